// Sends what a run's buddy is to hold, from one thread of its own, in the order of urgency: the
// gradients of the step in flight, then the question whether it is safe, then a snapshot; that goes
// first where the step would be one too many since the last.
//
// A step is safe once the buddy has the gradients of exactly that attempt and a whole snapshot that
// is at most `steps` - 1 versions behind it. Where there is no such snapshot one is asked for.
// Every message is repeated until it is answered or overtaken.
//
// Thread rule: any thread; the listener is called on the sender's thread without a lock of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/values.h"
#include "server/cluster/peers.h"
#include "server/cluster/vote_exchange.h"
#include "server/engine/state_copy.h"

namespace muond {

// The daemon that holds the copies of `daemon`.
inline int BuddyOf(int daemon, int count) { return (daemon + 1) % count; }

// Of a snapshot and the next one: so that it has arrived before the first is too old.
inline std::int64_t StepsBetweenSnapshots(std::int64_t steps) { return (steps + 1) / 2; }

// Whose gradients: as v1::BuddyAttempt.
struct BuddyAttemptKey {
  std::int64_t step = 0, generation = 0, number = 0;
  friend bool operator==(const BuddyAttemptKey&, const BuddyAttemptKey&) = default;
};

// The elements that this daemon owns of one reduced gradient, packed.
struct BuddyPiece {
  int state = 0;
  Dtype dtype = Dtype::kF32;
  double divisor = 1;
  std::shared_ptr<const void> keepalive;
  const char* data = nullptr;
  std::int64_t bytes = 0;
};

class BuddySender {
 public:
  struct Listener {
    // The attempt is safe.
    std::function<void(const BuddyAttemptKey&)> held;
    // A snapshot of the present version is needed (Snapshot). False: none can be made now, it is
    // asked for again.
    std::function<bool()> wanted;
    // The buddy refused, or has been out of reach for long (UNAVAILABLE).
    std::function<void(int daemon, const absl::Status&, const PeerPosition*)> trouble;
    // So many bytes of payload were taken; and how long a safe step had to wait.
    std::function<void(std::int64_t bytes)> sent;
    std::function<void(absl::Duration)> waited;
  };
  // Sends nothing before Restart.
  BuddySender(std::shared_ptr<Peers> peers, std::int64_t steps, Listener listener);
  // Ends the thread, or lets it end by itself where it is the one that calls.
  ~BuddySender();

  // Another attempt than the last one's replaces it.
  void Add(const BuddyAttemptKey& attempt, BuddyPiece piece);
  void Seal(const BuddyAttemptKey& attempt, std::vector<int> states);
  // The step is over, or was thrown away.
  void EndAttempt();
  // Replaces what has not been sent of an earlier one. `copies` are let go of once it was sent.
  void Snapshot(std::int64_t version, std::shared_ptr<StateCopies> copies);
  // Other state is here now, of which the buddy holds a snapshot of version `held`; -1: none.
  // `introduction` says of which run and plan.
  void Restart(v1::PeerRun introduction, std::int64_t lineage, std::int64_t held);

 private:
  struct Work;
  std::shared_ptr<Work> work_;
};

}  // namespace muond
