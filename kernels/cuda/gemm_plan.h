// How a set of products is cut into tiles and dealt to the blocks of one launch.
//
// Pure: no device is touched. The result of a product does not depend on any choice made here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/gemm.h"

namespace muond::kernels::cuda {

// What a launch may use.
struct GemmMachine {
  int blocks = 0;        // resident blocks: one per multiprocessor
  bool hopper = false;   // gemm_sm90.cu rather than gemm_portable.cu
  int only_width = 0;    // != 0: no other width (measurements)
  int only_cluster = 0;  // != 0: no other cluster size (measurements)
};

// The tables of a GemmLaunch, in host memory.
struct GemmPlan {
  std::vector<GemmTile> tiles;
  std::vector<std::int32_t> begin;  // groups + 1
  int groups = 0;
  int cluster = 1;
  int width = 0;      // the widest tile
  double cycles = 0;  // estimated, of the busiest group
};

// The fastest plan by estimate. `first_op` is the index of ops[0] in GemmLaunch::ops.
GemmPlan PlanGemm(std::span<const GemmOp> ops, int first_op, const GemmMachine& machine);

}  // namespace muond::kernels::cuda
