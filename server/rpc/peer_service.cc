#include "server/rpc/peer_service.h"

#include "proto/check.h"

namespace muond {

absl::StatusOr<std::shared_ptr<Run>> PeerService::Find(const v1::PeerRun& peer,
                                                       bool exact) const {
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, runs_->Find(peer.run()));
  MUOND_RETURN_IF_ERROR(run->CheckPeer(static_cast<int>(peer.daemon()), peer.agreement(), exact));
  return run;
}

}  // namespace muond
