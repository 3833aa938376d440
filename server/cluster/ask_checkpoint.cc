#include "server/cluster/ask_checkpoint.h"

#include "absl/strings/str_format.h"
#include "grpcpp/grpcpp.h"
#include "proto/check.h"
#include "proto/status.h"

namespace muond {
namespace {

absl::Status Named(const Peers& peers, int daemon, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrFormat("daemon \"%s\": %s", peers.daemons()[daemon],
                                                     status.message()));
}

}  // namespace

std::vector<absl::StatusOr<v1::SavePartReply>> AskParts(
    Peers& peers, const v1::SavePartRequest& request, absl::Time deadline,
    const std::function<absl::StatusOr<v1::SavePartReply>()>& own) {
  std::vector<absl::StatusOr<v1::SavePartReply>> replies(peers.count());
  AtOnce(peers.count(), [&](int daemon) {
    if (daemon == peers.self()) {
      replies[daemon] = own();
      return;
    }
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::SavePartReply reply;
    const absl::Status status =
        FromGrpc(peers.checkpoint_parts(daemon).SavePart(&context, request, &reply));
    if (status.ok()) {
      replies[daemon] = std::move(reply);
    } else {
      replies[daemon] = Named(peers, daemon, status);
    }
  });
  return replies;
}

std::vector<absl::Status> AskStage(Peers& peers, const v1::StageRequest& request,
                                   absl::Time deadline, const std::function<absl::Status()>& own) {
  std::vector<absl::Status> statuses(peers.count());
  AtOnce(peers.count(), [&](int daemon) {
    if (daemon == peers.self()) {
      statuses[daemon] = own();
      return;
    }
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::StageReply reply;
    statuses[daemon] = Named(
        peers, daemon,
        FromGrpc(peers.checkpoint_parts(daemon).Stage(&context, request, &reply)));
  });
  return statuses;
}

absl::StatusOr<v1::SaveReply> PassOn(Peers& peers, const v1::SaveRequest& request,
                                     absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  v1::SaveReply reply;
  MUOND_RETURN_IF_ERROR(FromGrpc(peers.checkpoints(0).Save(&context, request, &reply)));
  return reply;
}

absl::StatusOr<v1::RestoreReply> PassOn(Peers& peers, const v1::RestoreRequest& request,
                                        absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  v1::RestoreReply reply;
  MUOND_RETURN_IF_ERROR(FromGrpc(peers.checkpoints(0).Restore(&context, request, &reply)));
  return reply;
}

}  // namespace muond
