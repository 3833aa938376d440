// Asks this daemon's buddy for what it holds. All calls block.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muond/v1/buddy.pb.h"
#include "server/cluster/peers.h"

namespace muond {

// Waits for a buddy that is not at the version yet. FAILED_PRECONDITION when it can't make it, or
// has lost its own state.
absl::StatusOr<v1::BuddyIndexReply> AskIndex(Peers& peers, const v1::BuddyIndexRequest& request);

// The `bytes` bytes of an item of that index, to `out`. DATA_LOSS when others come than were sent;
// `stopped` is asked before each call, and what it returns ends the reading.
absl::Status ReadItem(Peers& peers, const v1::PeerRun& introduction, std::int64_t item, char* out,
                      std::int64_t bytes, const std::function<absl::Status()>& stopped);

}  // namespace muond
