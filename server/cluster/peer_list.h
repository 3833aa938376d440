// Which daemons share the runs of this one, and which of them it is.
//
// All daemons of a cluster must have the same list in the same order: the order is what a plan and
// a vote name daemons by.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muond {

// "host:port" or "unix:/path" of each daemon, as trainers and the other daemons reach it. Empty:
// this daemon has no peers.
struct PeerList {
  std::vector<std::string> daemons;
  int self = 0;
};

// What the operator says of the peers.
struct PeerOptions {
  // One of: "a:7070,b:7070" · "dns:///muond-headless:7070" (every address of a headless service,
  // sorted) · "@/etc/muond/peers" (a file, one address a line, # for comments) · "" for none.
  std::string peers;
  // This daemon's own entry; empty: the entry that is one of `listen`, or, with DNS, an address of
  // this machine.
  std::string advertise;
  std::vector<std::string> listen;
  // With DNS: how many addresses there must be. A list that is still growing would differ.
  int daemons_expected = 0;
  absl::Duration resolve_timeout = absl::Seconds(60);
};

// Waits for DNS until there are daemons_expected addresses. INVALID_ARGUMENT for a list that is
// malformed, names a daemon twice or lacks this one (the message says what would name it);
// NOT_FOUND for a file that is not there; UNAVAILABLE when DNS does not answer in time.
absl::StatusOr<PeerList> ResolvePeers(const PeerOptions& options);

}  // namespace muond
