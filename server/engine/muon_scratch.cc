#include "server/engine/muon_scratch.h"

#include <algorithm>
#include <map>
#include <utility>

namespace muond {
namespace {

std::int64_t BatchElements(const kernels::Backend& backend) {
  return backend.host_memory() ? kMuonBatchElements : kMuonDeviceBatchElements;
}

}  // namespace

bool Packed(const ShardState& state) {
  return std::any_of(state.matrices.begin(), state.matrices.end(),
                     [](const MatrixBlock& block) { return block.ranges.size() > 1; });
}

std::int64_t Footprint(const ShardState& state) {
  std::int64_t matrices = 0;
  for (const MatrixBlock& block : state.matrices) {
    matrices += Aligned(block.rows * block.cols);
  }
  return std::max(Aligned(state.elements), matrices);
}

std::vector<std::vector<int>> BatchesOf(const std::vector<ShardState>& states,
                                        const std::vector<int>& indexes,
                                        const kernels::Backend& backend) {
  std::vector<std::vector<int>> batches;
  std::int64_t elements = 0;
  for (int index : indexes) {
    const std::int64_t more = Footprint(states[index]);
    if (batches.empty() || elements + more > BatchElements(backend)) {
      batches.emplace_back();
      elements = 0;
    }
    batches.back().push_back(index);
    elements += more;
  }
  return batches;
}

std::size_t MuonScratchBytes(std::span<const ShardState> states, const kernels::Backend& backend,
                             bool overlap) {
  std::int64_t total = 0, largest = 0;
  bool packed = false;
  for (const ShardState& state : states) {
    if (!state.muon()) continue;
    const std::int64_t elements = Footprint(state);
    total += elements;
    largest = std::max(largest, elements);
    packed = packed || Packed(state);
  }
  const std::int64_t batch = std::max(largest, std::min(total, BatchElements(backend)));
  return static_cast<std::size_t>(batch) * kernels::DtypeBytes(backend.iterate_dtype()) *
         (1 + (overlap ? 0 : 1) + (packed ? 1 : 0));
}

std::size_t MuonResultBytes(std::span<const ShardState> states, const kernels::Backend& backend) {
  std::int64_t elements = 0;
  for (const ShardState& state : states) {
    for (const MatrixBlock& block : state.matrices) elements += Aligned(block.rows * block.cols);
  }
  return static_cast<std::size_t>(elements) * kernels::DtypeBytes(backend.iterate_dtype());
}

// On the host matrices take their time one by one; a device is only busy with many.
std::int64_t EarlyElements(const kernels::Backend& backend) {
  return backend.host_memory() ? 1 : 2 * kMuonBatchElements;
}

std::int64_t EarlyLeast(const kernels::Backend& backend) {
  return backend.host_memory() ? 1 : kMuonBatchElements;
}

namespace {

using ShapesByRule =
    std::map<const kernels::NewtonSchulzRule*, std::vector<kernels::MatrixShape>>;

ShapesByRule ShapesOf(const std::vector<ShardState>& states, const std::vector<int>& indexes) {
  ShapesByRule shapes;
  for (int index : indexes) {
    for (const MatrixBlock& block : states[index].matrices) {
      shapes[states[index].newton_schulz].push_back({block.rows, block.cols});
    }
  }
  return shapes;
}

// Of batches that come together early: how many matrices of a shape that will be nobody knows, and
// fewer may be put into larger groups.
std::size_t EarlyBytes(const ShapesByRule& all, std::int64_t elements,
                       const kernels::Backend& backend) {
  constexpr std::int64_t kFew = 64;  // beyond which a group is a part of them
  std::size_t bytes = 0;
  for (const auto& [rule, shapes] : all) {
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> counts;
    for (const kernels::MatrixShape& shape : shapes) ++counts[{shape.rows, shape.cols}];
    for (const auto& [sides, count] : counts) {
      const std::int64_t most = std::clamp<std::int64_t>(
          elements / std::max<std::int64_t>(sides.first * sides.second, 1), 1, count);
      const kernels::MatrixShape shape{sides.first, sides.second};
      for (std::int64_t n = most; n > 0; n = std::min(n - 1, kFew)) {
        bytes = std::max(bytes, backend.NewtonSchulzScratchBytes(
                                    std::vector<kernels::MatrixShape>(n, shape), *rule));
      }
    }
  }
  return bytes;
}

}  // namespace

std::size_t NewtonSchulzBytes(const std::vector<ShardState>& states, bool overlap,
                              const kernels::Backend& backend) {
  std::vector<int> muon;
  for (int i = 0; i < std::ssize(states); ++i) {
    if (states[i].muon() && states[i].elements > 0) muon.push_back(i);
  }
  std::size_t bytes = 0;
  for (const std::vector<int>& batch : BatchesOf(states, muon, backend)) {
    for (const auto& [rule, shapes] : ShapesOf(states, batch)) {
      bytes = std::max(bytes, backend.NewtonSchulzScratchBytes(shapes, *rule));
    }
  }
  if (!overlap || backend.host_memory()) return bytes;
  return std::max(bytes, EarlyBytes(ShapesOf(states, muon), EarlyElements(backend), backend));
}

}  // namespace muond
