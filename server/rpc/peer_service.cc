#include "server/rpc/peer_service.h"

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/version.h"

namespace muond {

absl::StatusOr<std::shared_ptr<Run>> PeerService::Find(const v1::PeerRun& peer,
                                                       bool exact) const {
  // First of all: to a daemon of another version the run may be unknown, too.
  MUOND_RETURN_IF_ERROR(CheckVersions(
      OwnVersion(), peer.version(),
      absl::StrFormat("run \"%s\": daemon %d of its list", peer.run(), peer.daemon())));
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, runs_->Find(peer.run()));
  MUOND_RETURN_IF_ERROR(run->CheckPeer(static_cast<int>(peer.daemon()), peer.agreement(), exact));
  return run;
}

}  // namespace muond
