#include "proto/shard.h"

#include <algorithm>

namespace muond {

std::int64_t ElementsBefore(const Box& box, const Dims& shape, std::int64_t flat) {
  if (box.flat) return std::clamp<std::int64_t>(flat - box.offset[0], 0, box.size[0]);
  std::int64_t in_box = box.Elements();
  if (in_box == 0) return 0;
  std::int64_t in_tensor = 1;
  for (const std::int64_t dim : shape) in_tensor *= dim;
  if (flat >= in_tensor) return in_box;
  // Dimension by dimension: whole rows of the box above the element's row come before it; the row
  // itself is looked into only where the element's index lies within the box.
  std::int64_t before = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    in_tensor /= shape[d];
    in_box /= box.size[d];
    const std::int64_t index = flat / in_tensor - box.offset[d];
    flat %= in_tensor;
    before += std::clamp<std::int64_t>(index, 0, box.size[d]) * in_box;
    if (index < 0 || index >= box.size[d]) break;
  }
  return before;
}

ElementRange RangeInShard(const Box& box, const Dims& shape, const Shard& shard) {
  const std::int64_t first = ElementsBefore(box, shape, shard.first);
  return {first, ElementsBefore(box, shape, shard.first + shard.elements) - first};
}

std::vector<ElementRange> RangesInShards(const Box& box, const Dims& shape,
                                         std::span<const Shard> shards) {
  std::vector<ElementRange> ranges;
  for (const Shard& shard : shards) {
    const ElementRange range = RangeInShard(box, shape, shard);
    if (range.count == 0) continue;
    if (!ranges.empty() && ranges.back().first + ranges.back().count == range.first) {
      ranges.back().count += range.count;
    } else {
      ranges.push_back(range);
    }
  }
  return ranges;
}

}  // namespace muond
