// Asks all other daemons for the hashes of the state that they own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/cluster/peers.h"

namespace muond {

// Blocks until all have answered. FAILED_PRECONDITION when one is at another version, UNAVAILABLE
// naming the daemon that does not answer within `timeout`.
absl::StatusOr<std::vector<v1::StateHashesReply>> AskStateHashes(Peers& peers,
                                                                 const std::string& run,
                                                                 const std::string& plan_hash,
                                                                 std::int64_t version,
                                                                 absl::Duration timeout);

}  // namespace muond
