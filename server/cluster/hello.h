// Asks all other daemons where a run stands with them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/cluster/peers.h"
#include "server/cluster/vote_exchange.h"

namespace muond {

struct HelloAnswer {
  int daemon = 0;
  absl::Status status;  // NOT_FOUND: it does not know the run. FAILED_PRECONDITION: one of the
                        // two is of another version than the other works with, or plans otherwise
  PeerPosition position;
};

// Blocks until all have answered or `timeout` has passed; one answer of each other daemon.
std::vector<HelloAnswer> AskHello(Peers& peers, const std::string& run,
                                  const std::string& plan_hash, absl::Duration timeout);

}  // namespace muond
