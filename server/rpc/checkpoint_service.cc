#include "server/rpc/checkpoint_service.h"

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/rpc/tenant.h"

namespace muond {

absl::Status NoCheckpoints() {
  return absl::FailedPreconditionError(
      "checkpoint: this daemon has no directory for checkpoints: start it with --checkpoint-dir");
}

absl::StatusOr<std::shared_ptr<Run>> CheckpointService::Find(
    const grpc::CallbackServerContext& context, const std::string& name) const {
  if (checkpointer_ == nullptr) return NoCheckpoints();
  return FindRun(context, *runs_, name);
}

absl::StatusOr<std::shared_ptr<Run>> CheckpointPeerService::Find(const v1::PeerRun& peer) const {
  if (checkpointer_ == nullptr) return NoCheckpoints();
  auto run = runs_->Find(peer.run());
  if (!run.ok()) {
    return absl::UnavailableError(
        absl::StrFormat("run \"%s\": has not been registered here yet", peer.run()));
  }
  MUOND_RETURN_IF_ERROR((*run)->CheckPeer(static_cast<int>(peer.daemon()), peer.agreement(),
                                          /*exact=*/true));
  return run;
}

}  // namespace muond
