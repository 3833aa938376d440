// What a session does by itself when a run is interrupted, and who hears of it.
//
// An interruption is a daemon that restarts, is upgraded or dies, a run that is restored, or a step
// that another rank had started over: a call is then answered with UNAVAILABLE, ABORTED, NOT_FOUND
// (the daemon knows the run or the rank no more) or "needs a restore". The session registers again
// until the run stands where it stood and repeats what was interrupted. Nothing of that is silent.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace muond::client {

struct Interruption {
  enum class Phase {
    kBegun,    // the first failure
    kLasting,  // rejoined or tried again, and something else is in the way
    kOver,     // what was interrupted is done
    kGivenUp,  // the caller gets an error
  };
  Phase phase = Phase::kBegun;
  std::string run;
  std::int64_t rank = 0;
  std::string action;           // "step 41", "pull of version 41"
  absl::Status cause;           // what was in the way last
  int attempts = 1;             // of the action, the one that failed included
  absl::Duration elapsed;       // since the first failure
  absl::Duration left;          // of recovery_timeout
  std::int64_t generation = 0;  // of the run, as far as the session knows
};

using InterruptionHook = std::function<void(const Interruption&)>;

// One line, without its end: `run "kjv": rank 3: step 41 was interrupted: ...`.
std::string Describe(const Interruption& interruption);

}  // namespace muond::client
