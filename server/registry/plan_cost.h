// What Newton-Schulz costs, and the least that the busiest owner can have to do. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond {

// Floating point operations, exactly: sums don't depend on their order, and two daemons agree on
// every tie. 2^127 holds what 64-bit shapes can ask for.
using Flops = unsigned __int128;

// Iterations of a group's Newton-Schulz: its custom list's, or its named set's. INVALID_ARGUMENT
// that names the group for a set that nobody knows, in the words of the engine.
absl::StatusOr<std::int64_t> NewtonSchulzSteps(const GroupSpec& group);

// 4 max min^2 + 2 min^3 per iteration, the standard form without symmetric kernels: X X^T, its
// square, and the product with X; max and min of rows and cols.
Flops NewtonSchulzFlops(std::int64_t rows, std::int64_t cols, std::int64_t steps);

// A lower bound on the largest load when `costs`, sorted from large to small, go whole to `owners`
// owners: the mean; and, for every j, the sum of the j + 1 smallest of the j owners + 1 largest
// costs, of which some owner must have j + 1. For equal costs that is cost x ceil(count / owners).
// Rounded up.
Flops SingleOwnershipFloor(const std::vector<Flops>& costs, std::int64_t owners);

}  // namespace muond
