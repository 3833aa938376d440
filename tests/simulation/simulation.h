// Plays one scenario to its end: daemons, trainers, and whatever goes wrong between them.
#pragma once

#include <cstdint>
#include <string>

#include "tests/simulation/bugs.h"
#include "tests/simulation/checker.h"
#include "tests/simulation/scenario.h"

namespace muond::simulation {

struct Result {
  std::string violation;  // empty: every invariant held, and every step was consumed in time
  std::int64_t events = 0;
  Time ended = 0;
  std::uint64_t hash = 0;  // of all that happened, in its order
  Coverage coverage;
};

struct Options {
  Bug bug = Bug::kNone;
  // More crashes, and several daemons that raise the generation and get into each other's way.
  bool restless = false;
  bool verbose = false;  // print every event
};

// The same seed and options give the same result, event by event.
Result Simulate(std::uint64_t seed, const Options& options = {});

}  // namespace muond::simulation
