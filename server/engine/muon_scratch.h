// How Muon's states share scratch: which of them make a batch, and what they take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/shard_state.h"

namespace muond {

// Elements of Muon parameters that share one batch, unless a single one is larger. A device wants
// more at a time to be busy, and needs half the bytes for each.
inline constexpr std::int64_t kMuonBatchElements = std::int64_t{32} << 20;
inline constexpr std::int64_t kMuonDeviceBatchElements = std::int64_t{256} << 20;

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

// Bytes of scratch that a commit needs for any of these states: U of one batch in the iterate
// dtype, O of it unless O has a place of its own, and a packed copy of U where a row split gathers.
std::size_t MuonScratchBytes(std::span<const ShardState> states, const kernels::Backend& backend,
                             bool overlap);
// Bytes that the backend's Newton-Schulz takes meanwhile.
std::size_t NewtonSchulzBytes(const std::vector<ShardState>& states, bool overlap,
                              const kernels::Backend& backend);
// Bytes of O of all their matrices.
std::size_t MuonResultBytes(std::span<const ShardState> states, const kernels::Backend& backend);

// How much is orthogonalized early at a time, unless a single state is larger: what comes in
// meanwhile waits for the end of it.
std::int64_t EarlyElements(const kernels::Backend& backend);
// With less than this the work waits for more, unless no more will come: few matrices take a device
// as long as many.
std::int64_t EarlyLeast(const kernels::Backend& backend);

}  // namespace muond
