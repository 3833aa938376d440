// What a simulated run trains: parameters made of a few blocks, who owns which block, which rank
// holds which slice, and the machine's layouts that follow. A block stands for 64 Ki elements; its
// state is one number. Plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/step/step_layout.h"
#include "tests/simulation/random.h"

namespace muond::simulation {

struct BlockRange {
  int first = 0;
  int count = 0;
  bool Holds(int block) const { return block >= first && block < first + count; }
};

struct ModelParameter {
  std::string name;
  bool replicated = false;
  int state = 0;   // index of the parameter that holds the state
  int blocks = 0;  // 0: without elements
  // By rank. Of a sliced parameter all slices together cover each block once; of a replicated one
  // each rank's own do, or the rank has none.
  std::vector<std::vector<BlockRange>> slices;
};

struct Model {
  int world_size = 1;
  int daemons = 1;
  std::vector<ModelParameter> parameters;
  std::vector<std::vector<int>> owners;  // by state and block: the daemon

  bool IsState(int p) const { return parameters[p].state == p; }
  // Whether the slice has a block that the daemon owns.
  bool Reaches(int p, const BlockRange& slice, int daemon) const;
  // As one of several daemons sees the run, as far as its first `count` parameters.
  StepLayout LayoutOf(int daemon, std::size_t count) const;
  // As the only daemon would.
  StepLayout WholeLayout() const;
};

// Where the owners come from: drawn, or the plan that the service would make.
enum class Planning : std::uint8_t { kRandom, kPlan };

Model MakeModel(Random& random, int world_size, int daemons, Planning planning);

}  // namespace muond::simulation
