#include "server/cluster/hello.h"

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/version.h"

namespace muond {

std::vector<HelloAnswer> AskHello(Peers& peers, const std::string& run,
                                  const std::string& plan_hash, absl::Duration timeout) {
  v1::HelloRequest request;
  *request.mutable_peer() = peers.Introduction(run, plan_hash);
  std::vector<HelloAnswer> answers;
  for (int daemon = 0; daemon < peers.count(); ++daemon) {
    if (daemon != peers.self()) answers.push_back({daemon, {}, {}});
  }
  AtOnce(static_cast<int>(answers.size()), [&](int i) {
    HelloAnswer& answer = answers[i];
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadlineIn(timeout));
    v1::HelloReply reply;
    answer.status = FromGrpc(peers.stub(answer.daemon).Hello(&context, request, &reply));
    if (answer.status.ok()) {
      answer.status = CheckVersions(OwnVersion(), reply.version(),
                                    absl::StrFormat("run \"%s\": daemon \"%s\"", run,
                                                    peers.daemons()[answer.daemon]));
    }
    answer.position = {reply.position().generation(), reply.position().next_step(),
                       reply.position().lineage(), reply.position().state()};
  });
  return answers;
}

}  // namespace muond
