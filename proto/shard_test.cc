#include "proto/shard.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace muond {
namespace {

// The row-major indices of the box's elements, in the box's order, by counting through it.
std::vector<std::int64_t> Listed(const Box& box, const Dims& shape) {
  std::vector<std::int64_t> elements;
  if (box.flat) {
    for (std::int64_t i = 0; i < box.size[0]; ++i) elements.push_back(box.offset[0] + i);
    return elements;
  }
  if (box.Elements() == 0) return elements;
  Dims at(shape.size(), 0);
  while (true) {
    std::int64_t flat = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) flat = flat * shape[d] + box.offset[d] + at[d];
    elements.push_back(flat);
    int d = static_cast<int>(shape.size()) - 1;
    while (d >= 0 && ++at[d] == box.size[d]) at[d--] = 0;
    if (d < 0) return elements;
  }
}

ElementRange ByCounting(const Box& box, const Dims& shape, const Shard& shard) {
  ElementRange range;
  for (const std::int64_t element : Listed(box, shape)) {
    range.first += element < shard.first ? 1 : 0;
    range.count += element >= shard.first && element < shard.first + shard.elements ? 1 : 0;
  }
  return range;
}

class RandomBoxes {
 public:
  std::int64_t Below(std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end)(random_);
  }
  Dims Shape() {
    Dims shape(static_cast<std::size_t>(Below(4)));
    for (std::int64_t& dim : shape) dim = 1 + Below(5);
    return shape;
  }
  Box BoxOf(const Dims& shape, std::int64_t elements) {
    Box box;
    box.flat = Below(3) == 0;
    for (const std::int64_t dim : box.flat ? Dims{elements} : shape) {
      box.offset.push_back(Below(dim));
      box.size.push_back(Below(dim - box.offset.back()));
    }
    return box;
  }

 private:
  std::mt19937_64 random_{20261130};
};

TEST(Shard, RangesOfRandomBoxesAreThoseOfCounting) {
  RandomBoxes random;
  for (int i = 0; i < 20'000; ++i) {
    const Dims shape = random.Shape();
    const std::int64_t elements = ElementCount(shape).value();
    const Box box = random.BoxOf(shape, elements);
    ASSERT_TRUE(ValidateBox(box, shape).ok());
    Shard shard{.first = random.Below(elements)};
    shard.elements = random.Below(elements - shard.first);
    EXPECT_EQ(RangeInShard(box, shape, shard), ByCounting(box, shape, shard))
        << box.ToString() << " of " << DimsToString(shape) << ", shard at " << shard.first << " of "
        << shard.elements;
  }
}

TEST(Shard, ShardsThatCoverATensorCoverEveryBoxInOrder) {
  RandomBoxes random;
  for (int i = 0; i < 2'000; ++i) {
    const Dims shape = random.Shape();
    const std::int64_t elements = ElementCount(shape).value();
    const Box box = random.BoxOf(shape, elements);
    std::int64_t next = 0;
    for (Shard shard; shard.first < elements; shard.first += shard.elements) {
      shard.elements = 1 + random.Below(elements - shard.first - 1);
      const ElementRange range = RangeInShard(box, shape, shard);
      EXPECT_EQ(range.first, next);
      next += range.count;
      // What the range says is what ForEachRun then visits: elements of the shard alone.
      ForEachRun(box, shape, range.first, range.count,
                 [&](std::int64_t tensor, std::int64_t, std::int64_t count) {
                   EXPECT_GE(tensor, shard.first);
                   EXPECT_LE(tensor + count, shard.first + shard.elements);
                 });
    }
    EXPECT_EQ(next, box.Elements());
  }
}

TEST(Shard, ScalarsAndEmptyTensors) {
  EXPECT_EQ(RangeInShard(WholeBox({}), {}, {.elements = 1}), (ElementRange{0, 1}));
  EXPECT_EQ(RangeInShard(WholeBox({}), {}, {.first = 1}), (ElementRange{1, 0}));
  EXPECT_EQ(RangeInShard(WholeBox({0, 4}), {0, 4}, {}), (ElementRange{0, 0}));
  EXPECT_EQ(RangeInShard({{0}, {0}, true}, {0, 4}, {}), (ElementRange{0, 0}));
}

TEST(Shard, ABoxOfManyBytesDoesNotOverflow) {
  const std::int64_t half = std::int64_t{1} << 29;
  const Dims shape = {2 * half, 2 * half};
  EXPECT_EQ(RangeInShard({{half, 0}, {half, half}}, shape,
                         {.first = half * 2 * half, .elements = half * 2 * half}),
            (ElementRange{0, half * half}));
}

TEST(Shard, RangesOfShardsThatAdjoinAreOne) {
  // Rows 1 and 2 of 4 x 5, columns 1 to 3: elements 6, 7, 8 and 11, 12, 13.
  const Box box{{1, 1}, {2, 3}, false};
  const Shard shards[] = {{.first = 0, .elements = 7}, {.first = 7, .elements = 1},
                          {.first = 12, .elements = 8}};
  const std::vector<ElementRange> expected = {{0, 2}, {4, 2}};
  EXPECT_EQ(RangesInShards(box, {4, 5}, shards), expected);
  // Between 8 and 11 the box has nothing: its own elements go on without a gap.
  const Shard around[] = {{.first = 0, .elements = 9}, {.first = 10, .elements = 10}};
  EXPECT_EQ(RangesInShards(box, {4, 5}, around), (std::vector<ElementRange>{{0, 6}}));
  EXPECT_TRUE(RangesInShards(box, {4, 5}, {}).empty());
}

}  // namespace
}  // namespace muond
