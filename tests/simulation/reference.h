// The same training in one process: one machine that owns everything, nothing lost, nothing late.
// What the daemons of a lineage do must be what it does, bit by bit.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "server/step/step_machine.h"
#include "tests/simulation/scenario.h"
#include "tests/simulation/toy_engine.h"

namespace muond::simulation {

class Reference {
 public:
  Reference(const Scenario& scenario, std::int64_t lineage, std::int64_t first_step);

  struct Consumed {
    StepOutcome outcome;
    std::optional<CommitEffect> commit;  // none: skipped
  };
  std::int64_t next_step() const { return machine_.next_step(); }
  // Trains next_step() with these gradients, by rank.
  const Consumed& Train(const std::vector<Content>& contents);
  // nullptr: not consumed.
  const Consumed* Of(std::int64_t step) const;
  // nullptr: there is no such version yet.
  const ToyState* StateAt(std::int64_t version) const;

 private:
  void Carry(const Effects& effects);
  void TrainByGradients(const std::vector<Content>& contents);
  void Skip(SkipCause cause);

  const Scenario& scenario_;
  const std::int64_t lineage_;
  const StepLayout layout_;
  StepMachine machine_;
  ToyEngine engine_;
  std::map<std::int64_t, Consumed> consumed_;  // by step
  std::map<std::int64_t, ToyState> states_;    // by version
};

}  // namespace muond::simulation
