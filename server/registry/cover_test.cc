#include "server/registry/cover.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/registry/run_for_test.h"

namespace muond {
namespace {

Box Flat(std::int64_t begin, std::int64_t end) { return {{begin}, {end - begin}, true}; }

// B-054: shards [0, 6) and [8, 12) of 12 leave a hole that no rank updates.
TEST(Cover, MegatronLm6048_AGapIsNamed) {
  EXPECT_STATUS(CheckExactCover("w", {4, 3}, {{Flat(0, 6), 0}, {Flat(8, 12), 1}}),
                absl::IsInvalidArgument,
                "parameter \"w\": elements [6, 8) of 12 are in no rank's slices");
}

TEST(Cover, MegatronLm6048_AnOverlapIsNamed) {
  EXPECT_STATUS(CheckExactCover("w", {4, 3}, {{Flat(0, 7), 0}, {Flat(6, 12), 1}}),
                absl::IsInvalidArgument,
                "parameter \"w\": slices of ranks 0 and 1 overlap at elements [6, 7)");
}

TEST(Cover, OneRankCanOverlapItself) {
  EXPECT_STATUS(CheckNoOverlap("w", {12}, {{Flat(0, 7), 3}, {Flat(6, 12), 3}}),
                absl::IsInvalidArgument, "slices of rank 3 overlap at elements [6, 7)");
}

TEST(Cover, TakesTheCutsOfEveryTrainer) {
  const Dims shape = {4, 6};
  const std::vector<std::vector<OwnedBox>> covers = {
      {{WholeBox(shape), 0}},
      {{Flat(0, 24), 0}},
      {{Flat(0, 5), 0}, {Flat(5, 13), 1}, {Flat(13, 24), 2}},  // ZeRO
      {{{{0, 0}, {2, 6}}, 0}, {{{2, 0}, {2, 6}}, 1}},          // rows
      {{{{0, 0}, {4, 2}}, 0}, {{{0, 2}, {4, 4}}, 1}},          // columns
      {{{{0, 0}, {2, 3}}, 0},
       {{{0, 3}, {2, 3}}, 1},  // both
       {{{2, 0}, {2, 3}}, 2},
       {{{2, 3}, {2, 3}}, 3}},
      {{Flat(0, 9), 0}, {{{1, 3}, {1, 3}}, 1}, {{{2, 0}, {2, 6}}, 2}},  // a mix
  };
  for (const auto& boxes : covers) EXPECT_TRUE(CheckExactCover("w", shape, boxes).ok());
  EXPECT_TRUE(CheckExactCover("s", {}, {{WholeBox({}), 0}}).ok());
  EXPECT_TRUE(CheckExactCover("s", {}, {{Flat(0, 1), 0}}).ok());
  EXPECT_TRUE(CheckExactCover("e", {0, 6}, {}).ok());
}

TEST(Cover, NobodyHoldsAnything) {
  EXPECT_STATUS(CheckExactCover("w", {4, 3}, {}), absl::IsInvalidArgument,
                "elements [0, 12) of 12 are in no rank's slices");
}

// ---- Against brute force ----------------------------------------------------------------------

class RandomCover {
 public:
  explicit RandomCover(unsigned seed) : random_(seed) {
    shape_.resize(Below(5));
    for (auto& dim : shape_) dim = 1 + Below(5);
    if (Below(2) == 0) {
      Tile(WholeBox(shape_));
      if (Below(2) == 0 && !boxes_.empty()) boxes_.erase(boxes_.begin() + Below(boxes_.size()));
      if (Below(3) == 0) Add(RandomBox());
    } else {
      for (std::int64_t i = Below(5); i > 0; --i) Add(RandomBox());
    }
    std::shuffle(boxes_.begin(), boxes_.end(), random_);
    for (std::size_t i = 0; i < boxes_.size(); ++i) boxes_[i].rank = static_cast<std::int64_t>(i);
  }

  const Dims& shape() const { return shape_; }
  const std::vector<OwnedBox>& boxes() const { return boxes_; }

  std::string Text() const {
    std::string text = DimsToString(shape_);
    for (const OwnedBox& owned : boxes_) text += " " + owned.box.ToString();
    return text;
  }

 private:
  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }

  void Add(Box box) { boxes_.push_back({std::move(box), 0}); }

  Box RandomBox() {
    Box box;
    box.flat = Below(2) == 0;
    for (const std::int64_t bound : box.flat ? Dims{*ElementCount(shape_)} : shape_) {
      box.offset.push_back(Below(bound));
      box.size.push_back(Below(bound - box.offset.back() + 1));
    }
    return box;
  }

  // Cuts the box in two at random until it is kept; a contiguous one may be kept as flat ranges.
  void Tile(const Box& box) {
    if (boxes_.size() < 12 && Below(4) > 0 && !box.size.empty()) {
      const std::int64_t d = Below(static_cast<std::int64_t>(box.size.size()));
      if (box.size[d] > 1) {
        Box low = box;
        Box high = box;
        low.size[d] = 1 + Below(box.size[d] - 1);
        high.offset[d] += low.size[d];
        high.size[d] -= low.size[d];
        Tile(low);
        Tile(high);
        return;
      }
    }
    if (Below(2) == 0) return Add(box);
    ForEachRun(box, shape_, 0, box.Elements(), [&](std::int64_t at, std::int64_t, std::int64_t n) {
      const std::int64_t cut = Below(n + 1);
      if (cut > 0) Add(Flat(at, at + cut));
      if (cut < n) Add(Flat(at + cut, at + n));
    });
  }

  std::mt19937 random_;
  Dims shape_;
  std::vector<OwnedBox> boxes_;
};

// What the checks must say, from a count of every element.
struct Truth {
  std::string overlap;  // empty: none
  std::string gap;
};

Truth BruteForce(const Dims& shape, const std::vector<OwnedBox>& boxes) {
  const std::int64_t elements = *ElementCount(shape);
  std::vector<std::vector<const OwnedBox*>> holders(elements);
  for (const OwnedBox& owned : boxes) {
    ForEachRun(owned.box, shape, 0, owned.box.Elements(),
               [&](std::int64_t at, std::int64_t, std::int64_t n) {
                 for (std::int64_t i = 0; i < n; ++i) holders[at + i].push_back(&owned);
               });
  }
  Truth truth;
  const auto first = [&](auto&& bad) {
    return std::find_if(holders.begin(), holders.end(), bad) - holders.begin();
  };
  if (const std::int64_t at = first([](const auto& h) { return h.size() > 1; }); at < elements) {
    // The interval is where the first two holders of its first element stay together.
    const OwnedBox* a = holders[at][0];
    const OwnedBox* b = holders[at][1];
    std::int64_t end = at;
    while (end < elements && std::count(holders[end].begin(), holders[end].end(), a) > 0 &&
           std::count(holders[end].begin(), holders[end].end(), b) > 0) {
      ++end;
    }
    truth.overlap = absl::StrFormat("slices of ranks %d and %d overlap at elements [%d, %d)",
                                    a->rank, b->rank, at, end);
  }
  if (const std::int64_t at = first([](const auto& h) { return h.empty(); }); at < elements) {
    std::int64_t end = at;
    while (end < elements && holders[end].empty()) ++end;
    truth.gap =
        absl::StrFormat("elements [%d, %d) of %d are in no rank's slices", at, end, elements);
  }
  return truth;
}

TEST(Cover, AgreesWithBruteForceOnRandomMixesOfBoxesAndRanges) {
  int exact = 0;
  int gaps = 0;
  int overlaps = 0;
  for (unsigned seed = 0; seed < 20'000; ++seed) {
    const RandomCover random(seed);
    const Truth truth = BruteForce(random.shape(), random.boxes());
    const auto overlap = CheckNoOverlap("w", random.shape(), random.boxes());
    const auto cover = CheckExactCover("w", random.shape(), random.boxes());
    const std::string expected = truth.overlap.empty() ? truth.gap : truth.overlap;
    ASSERT_EQ(overlap.ok(), truth.overlap.empty()) << seed << ": " << random.Text();
    ASSERT_EQ(cover.ok(), expected.empty()) << seed << ": " << random.Text();
    if (!overlap.ok()) {
      ASSERT_EQ(std::string(overlap.message()), "parameter \"w\": " + truth.overlap)
          << random.Text();
    }
    if (!cover.ok()) {
      ASSERT_EQ(std::string(cover.message()), "parameter \"w\": " + expected) << random.Text();
    }
    ++(expected.empty() ? exact : truth.overlap.empty() ? gaps : overlaps);
  }
  // The generator has to visit all three.
  EXPECT_GT(exact, 1000);
  EXPECT_GT(gaps, 1000);
  EXPECT_GT(overlaps, 1000);
}

// ---- Speed ------------------------------------------------------------------------------------

// Generous: the point is that no work is proportional to rows or elements: that would take minutes.
class CoverSpeed : public ::testing::Test {
 protected:
  void TearDown() override {
    const auto taken = std::chrono::steady_clock::now() - begin_;
    EXPECT_LT(std::chrono::duration<double>(taken).count(), 10.0);
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

TEST_F(CoverSpeed, ColumnBlocksOfABillionRows) {
  const std::int64_t rows = std::int64_t{1} << 40;
  std::vector<OwnedBox> boxes;
  for (std::int64_t i = 0; i < 1024; ++i) boxes.push_back({{{0, i * 8}, {rows, 8}}, i});
  EXPECT_TRUE(CheckExactCover("w", {rows, 8192}, boxes).ok());
  boxes[700].box.size[0] -= 1;
  EXPECT_STATUS(
      CheckExactCover("w", {rows, 8192}, boxes), absl::IsInvalidArgument,
      absl::StrFormat("elements [%d, %d) of", (rows - 1) * 8192 + 5600, (rows - 1) * 8192 + 5608));
  boxes[700].box = {{5, 5599}, {1, 9}};
  EXPECT_STATUS(CheckExactCover("w", {rows, 8192}, boxes), absl::IsInvalidArgument,
                "ranks 699 and 700 overlap at elements [46559, 46560)");
}

TEST_F(CoverSpeed, AHundredThousandRangesAndAGridOfBlocks) {
  std::vector<OwnedBox> ranges;
  for (std::int64_t i = 0; i < 100'000; ++i) ranges.push_back({Flat(i * 10, (i + 1) * 10), i});
  EXPECT_TRUE(CheckExactCover("w", {1000, 1000}, ranges).ok());
  std::vector<OwnedBox> grid;
  for (std::int64_t i = 0; i < 200; ++i) {
    for (std::int64_t j = 0; j < 200; ++j) grid.push_back({{{i * 5, j * 5}, {5, 5}}, i});
  }
  EXPECT_TRUE(CheckExactCover("w", {1000, 1000}, grid).ok());
  // A range among blocks falls into at most three pieces.
  grid[0].box = Flat(0, 5);
  for (std::int64_t row = 1; row < 5; ++row) grid.push_back({Flat(row * 1000, row * 1000 + 5), 0});
  EXPECT_TRUE(CheckExactCover("w", {1000, 1000}, grid).ok());
}

TEST_F(CoverSpeed, AHundredThousandSmallParameters) {
  for (int i = 0; i < 100'000; ++i) {
    ASSERT_TRUE(CheckExactCover("w", {8, 8}, {{Flat(0, 32), 0}, {{{4, 0}, {4, 8}}, 1}}).ok());
  }
}

TEST_F(CoverSpeed, EntangledBoxesEndWithARefusal) {
  // Every box is cut off elsewhere in every dimension, and all are alive at once.
  const std::int64_t n = 3000;
  std::vector<OwnedBox> boxes;
  for (std::int64_t i = 0; i < n; ++i) boxes.push_back({{{i, i, 2 * i}, {n, n, 1}}, i});
  EXPECT_STATUS(CheckNoOverlap("w", {2 * n, 2 * n, 2 * n}, boxes), absl::IsResourceExhausted,
                "parameter \"w\": 3000 slices are too entangled");
}

}  // namespace
}  // namespace muond
