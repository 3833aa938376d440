// Raises the generation as one daemon does for all: first all promise, then all raise. Any daemon
// may try, several at a time; each number is proposed by one daemon for one order only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tests/simulation/bugs.h"
#include "tests/simulation/messages.h"
#include "tests/simulation/world.h"

namespace muond::simulation {

class Raiser {
 public:
  // `later` is the daemon's timer, which does not go off in a later life. `proposed` is on its
  // disk: the highest number that it has proposed.
  Raiser(int self, World& world, Bug bug, std::int64_t& proposed,
         std::function<void(Time, std::function<void()>)> later);

  bool active() const { return phase_ != Phase::kIdle; }
  bool reinitializes() const { return order_.reinitialize; }
  bool grows() const { return order_.grow; }
  // Tries to raise it above `above`; `done` gets OK once all have raised it, UNAVAILABLE when some
  // daemon did not answer in time or went higher, FAILED_PRECONDITION when only a
  // re-initialization helps. Not while active.
  // `grow`: with the late parameters; in any case where a daemon that has promised has them.
  void Start(std::int64_t above, bool reinitialize, std::int64_t resume_step, bool grow,
             std::function<void(const absl::Status&)> done);
  void OnAnswer(const Message& message);

 private:
  enum class Phase : std::uint8_t { kIdle, kPreparing, kRaising };
  void Propose(std::int64_t above);
  void Ask();
  void Order();
  void End(const absl::Status& status);

  const int self_;
  World& world_;
  const Bug bug_;
  std::int64_t& proposed_;
  const std::function<void(Time, std::function<void()>)> later_;

  Phase phase_ = Phase::kIdle;
  std::int64_t round_ = 0;  // of asking: tells late timers and answers
  std::int64_t try_ = 0;
  RaiseCall order_;
  std::vector<std::optional<Answer>> answers_;  // by daemon
  std::function<void(const absl::Status&)> done_;
  std::uint64_t calls_ = 0;
  std::map<std::uint64_t, std::int64_t> open_;  // calls, by number: the round
};

}  // namespace muond::simulation
