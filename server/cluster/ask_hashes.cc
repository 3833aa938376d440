#include "server/cluster/ask_hashes.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"

namespace muond {

absl::StatusOr<std::vector<v1::StateHashesReply>> AskStateHashes(Peers& peers,
                                                                 const std::string& run,
                                                                 const std::string& plan_hash,
                                                                 std::int64_t version,
                                                                 absl::Duration timeout) {
  v1::StateHashesRequest request;
  *request.mutable_peer() = peers.Introduction(run, plan_hash);
  request.set_version(version);
  std::vector<v1::StateHashesReply> replies(peers.count());
  std::vector<absl::Status> statuses(peers.count());
  AtOnce(peers.count(), [&](int daemon) {
    if (daemon == peers.self()) return;
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadlineIn(timeout));
    statuses[daemon] =
        FromGrpc(peers.stub(daemon).StateHashes(&context, request, &replies[daemon]));
  });
  for (int daemon = 0; daemon < peers.count(); ++daemon) {
    if (statuses[daemon].ok()) continue;
    return absl::Status(statuses[daemon].code(),
                        absl::StrFormat("daemon \"%s\": %s", peers.daemons()[daemon],
                                        statuses[daemon].message()));
  }
  return replies;
}

}  // namespace muond
