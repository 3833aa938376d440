// How Muon's states share scratch: which of them make a batch, and where each begins in it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/shard_state.h"

namespace muond {

// U of a parameter and O of a matrix begin at multiples of this many elements.
inline constexpr std::int64_t kScratchAlignment = 64;
inline std::int64_t Aligned(std::int64_t elements) {
  return (elements + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// Whether one of its matrices has rows that do not lie together.
bool Packed(const ShardState& state);
// Elements that a state takes of each region of the scratch: U whole, O and packed rows by matrix.
std::int64_t Footprint(const ShardState& state);
// The states of `indexes` that share scratch, in their order.
std::vector<std::vector<int>> BatchesOf(const std::vector<ShardState>& states,
                                        const std::vector<int>& indexes,
                                        const kernels::Backend& backend);

}  // namespace muond
