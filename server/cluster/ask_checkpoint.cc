#include "server/cluster/ask_checkpoint.h"

#include <type_traits>
#include <utility>

#include "absl/strings/str_format.h"
#include "grpcpp/grpcpp.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"

namespace muond {
namespace {

absl::Status Named(const Peers& peers, int daemon, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrFormat("daemon \"%s\": %s", peers.daemons()[daemon],
                                                     status.message()));
}

// Asks every daemon but this one, which answers for itself. `Answer`: a reply or why not, or a
// status where the reply says nothing.
template <typename Answer, typename Stub, typename Request, typename Reply>
std::vector<Answer> Ask(Peers& peers,
                        grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                        const Request& request, absl::Time deadline,
                        const std::function<Answer()>& own) {
  std::vector<Answer> answers(peers.count());
  AtOnce(peers.count(), [&](int daemon) {
    if (daemon == peers.self()) {
      answers[daemon] = own();
      return;
    }
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(deadline));
    Reply reply;
    const absl::Status status = Named(
        peers, daemon,
        FromGrpc((peers.checkpoint_parts(daemon).*method)(&context, request, &reply)));
    if constexpr (std::is_same_v<Answer, absl::Status>) {
      answers[daemon] = status;
    } else if (status.ok()) {
      answers[daemon] = std::move(reply);
    } else {
      answers[daemon] = status;
    }
  });
  return answers;
}

using Parts = v1::CheckpointPeer::Stub;

}  // namespace

std::vector<absl::StatusOr<v1::SavePartReply>> AskParts(
    Peers& peers, const v1::SavePartRequest& request, absl::Time deadline,
    const std::function<absl::StatusOr<v1::SavePartReply>()>& own) {
  return Ask(peers, &Parts::SavePart, request, deadline, own);
}

std::vector<absl::Status> AskStage(Peers& peers, const v1::StageRequest& request,
                                   absl::Time deadline, const std::function<absl::Status()>& own) {
  return Ask(peers, &Parts::Stage, request, deadline, own);
}

absl::StatusOr<v1::SaveReply> PassOn(Peers& peers, const v1::SaveRequest& request,
                                     absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  v1::SaveReply reply;
  MUOND_RETURN_IF_ERROR(FromGrpc(peers.checkpoints(0).Save(&context, request, &reply)));
  return reply;
}

absl::StatusOr<v1::RestoreReply> PassOn(Peers& peers, const v1::RestoreRequest& request,
                                        absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  v1::RestoreReply reply;
  MUOND_RETURN_IF_ERROR(FromGrpc(peers.checkpoints(0).Restore(&context, request, &reply)));
  return reply;
}

}  // namespace muond
