// Asking the other daemons for their part of a checkpoint. All calls block, on a thread of
// their own for each daemon.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muond/v1/checkpoint.pb.h"
#include "server/cluster/peers.h"

namespace muond {

// By daemon; `own` is this one's answer.
std::vector<absl::StatusOr<v1::SavePartReply>> AskParts(
    Peers& peers, const v1::SavePartRequest& request, absl::Time deadline,
    const std::function<absl::StatusOr<v1::SavePartReply>()>& own);

std::vector<absl::Status> AskStage(Peers& peers, const v1::StageRequest& request,
                                   absl::Time deadline, const std::function<absl::Status()>& own);

// Passes a request on to daemon 0, which this one is not.
absl::StatusOr<v1::SaveReply> PassOn(Peers& peers, const v1::SaveRequest& request,
                                     absl::Time deadline);
absl::StatusOr<v1::RestoreReply> PassOn(Peers& peers, const v1::RestoreRequest& request,
                                        absl::Time deadline);

}  // namespace muond
