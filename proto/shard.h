// Which part of a parameter one owner holds, and which part of a slice goes there. A parameter's
// shards are contiguous ranges of its row-major elements: a client that cuts its pushes by them and
// a daemon that waits for them compute the same ranges with the same function.
//
// Plain values and pure functions: no thread rule.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/values.h"

namespace muond {

// Elements [first, first + elements) of the flattened parameter, and who owns them.
struct Shard {
  int parameter = 0;  // index in RunSpec::parameters, of the state's holder: never a tied name
  std::int64_t first = 0;
  std::int64_t elements = 0;  // 0 only for a parameter without elements
  int owner = 0;              // index in Plan::owners (server/registry/plan.h)
  friend bool operator==(const Shard&, const Shard&) = default;
};

// Elements [first, first + count) of a box, counted in its own row-major order: what ForEachRun
// takes, and what the bytes of a slice are numbered by.
struct ElementRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

// How many elements of the box come before element `flat` of the row-major tensor, 0 <= flat <= its
// element count. The box must be valid for the shape. O(rank).
std::int64_t ElementsBefore(const Box& box, const Dims& shape, std::int64_t flat);

// The elements of the box that lie in the shard. Always one range, since a box lists its elements
// in the tensor's order; count is 0 where box and shard have none in common.
ElementRange RangeInShard(const Box& box, const Dims& shape, const Shard& shard);

// The elements of the box that lie in any of the shards, which are ascending and don't overlap:
// ascending, none adjacent (shards that adjoin are one range), none empty.
std::vector<ElementRange> RangesInShards(const Box& box, const Dims& shape,
                                         std::span<const Shard> shards);

}  // namespace muond
