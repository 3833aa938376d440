// Stands in for server/engine: keeps the slices of the step in flight, reduces them, and holds a
// state in which one application too many, too few or of something else shows for ever.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/step/step_machine.h"
#include "tests/simulation/scenario.h"

namespace muond::simulation {

// By state and block; only what the owner owns is kept up to date.
using ToyState = std::vector<std::vector<std::uint64_t>>;

class ToyEngine {
 public:
  // `daemon` -1: owns everything.
  ToyEngine(const Scenario& scenario, int daemon, std::int64_t lineage);

  void Store(const SliceId& id, const Content& content) { staged_[id] = content; }
  void Discard();
  // What is in the way: a slice that the layers need and nobody stored.
  absl::StatusOr<GradientFacts> Reduce(const ReduceEffect& effect, std::int64_t step);
  void Commit(const CommitEffect& effect);
  // Planted bugs: does the last commit once more; spoils the state.
  void CommitAgain();
  void Touch();

  bool Owns(int state, int block) const;
  const ToyState& state() const { return state_; }

 private:
  struct Reduced {
    std::vector<std::int64_t> sums;  // by block
    double divisor = 1;
  };
  absl::Status Add(const Layer& layer, std::int64_t step, int block, std::int64_t& sum,
                   bool& finite) const;

  const Scenario& scenario_;
  int daemon_;
  std::map<SliceId, Content> staged_;
  std::map<int, Reduced> reduced_, last_reduced_;
  CommitEffect last_commit_;
  ToyState state_;
};

}  // namespace muond::simulation
