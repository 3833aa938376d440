// What a seed stands for: the run, what its trainers say in each step, and how often what goes
// wrong. Everything follows from the seed; nothing here changes while a scenario is played.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/values.h"
#include "server/step/step_layout.h"
#include "tests/simulation/model.h"

namespace muond::simulation {

using Time = std::int64_t;  // simulated, in microseconds

// Which gradients a rank has for a step. Those of one lineage (see messages.h) and number are the
// same whenever they are pushed; a rank that lost its micro-batches makes others: the next number.
struct Content {
  std::int64_t lineage = 0;
  std::int64_t number = 0;
  friend auto operator<=>(const Content&, const Content&) = default;
};

// One block of one slice of a gradient, times the loss scale.
struct GradientBlock {
  std::int64_t value = 0;
  bool finite = true;
};

// How often things go wrong until the network heals. Probabilities are of one message or one call.
struct Faults {
  double drop = 0;
  double duplicate = 0;
  double slow = 0;  // a message takes up to `slowest`
  Time slowest = 0;
  std::vector<double> speeds;  // by node: delays are multiplied by it
  double partitions = 0;       // a second
  double pauses = 0;           // a second; of a node that hangs for a while
  double trainer_crashes = 0;  // a second
  double daemon_crashes = 0;   // a second; a daemon's state is lost
  double raises = 0;           // a second; somebody asks for a new generation
  double engine_failure = 0;   // of a reduction or commit
  double loses_gradients = 0;  // of a trainer that crashed
  double cancel = 0;           // of a Finish or Skip that waits
  double lie = 0;              // a rank says something else first to one daemon, once in a step
  Time heals = 0;              // from then on nothing goes wrong any more
};

struct Scenario {
  std::uint64_t seed = 0;
  Model model;
  RunSpec spec;
  std::int64_t steps = 0;
  // Parameters from `late` on are added to the run when trainers come to step `grows_at`: until
  // then they are absent for whoever knows them already.
  int late = 0;
  std::int64_t grows_at = 0;  // 0: none is
  bool Late(int p) const { return grows_at > 0 && p >= late; }
  // Whether all daemons must have them before this step.
  bool MustGrow(std::int64_t step) const { return grows_at > 0 && step >= grows_at; }
  bool any_daemon_raises = false;  // else daemon 0 only
  // Trainers begin the next step once one daemon has told the outcome, else once all have.
  bool eager = false;
  Time engine_slowest = 0;  // a reduction or commit takes up to this
  double overflow = 0;      // of a step: some of its blocks are not finite
  double state_overflow = 0;
  double trainer_skip = 0;
  double absent = 0;
  Faults faults;

  // -- What trainers say. `told` is the loss scale that the daemons gave for the step.
  double LossScale(std::int64_t lineage, std::int64_t step, double told) const;
  StepBegin BeginOf(std::int64_t lineage, std::int64_t step, double told) const;
  // The trainers skip the step on their own word.
  std::optional<SkipCause> SkipOf(std::int64_t lineage, std::int64_t step) const;
  bool Absent(int p, std::int64_t rank, std::int64_t step, const Content& content) const;
  // Without those that a run does not have that has not `grown`.
  std::vector<std::string> AbsentOf(std::int64_t rank, std::int64_t step, const Content& content,
                                    bool grown = true) const;

  // -- Data. `block` counts in the parameter.
  GradientBlock Gradient(const SliceId& id, std::int64_t step, const Content& content,
                         int block) const;
  // Whether a reduced block would overflow the state.
  bool OverflowsState(std::int64_t step, int state, int block, std::int64_t sum) const;
  std::uint64_t InitialState(std::int64_t lineage, int state, int block) const;
};

Scenario MakeScenario(std::uint64_t seed);

// The digest that a slice arrives with.
std::uint64_t DigestOf(const SliceId& id, const Content& content);

}  // namespace muond::simulation
