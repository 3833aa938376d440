#include "server/registry/matrix_view.h"

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/registry/run_for_test.h"

namespace muond {
namespace {

using Blocks = std::vector<MatrixBlock>;

Blocks View(const Dims& shape, Kind kind, const RowSplit& split = {}) {
  const auto blocks = MatrixBlocks("w", shape, kind, split);
  EXPECT_TRUE(blocks.ok()) << blocks.status();
  return blocks.value_or(Blocks());
}

double OriginalFactor(const MatrixBlock& block) {
  return ShapeFactorOf(ShapeFactor::kOriginal, 1.0, block.rows, block.cols);
}

TEST(ResolveKind, FollowsTheRankUpToTwo) {
  EXPECT_EQ(*ResolveKind("w", {}, Kind::kUnspecified), Kind::kScalar);
  EXPECT_EQ(*ResolveKind("w", {5}, Kind::kUnspecified), Kind::kVector);
  EXPECT_EQ(*ResolveKind("w", {1, 5}, Kind::kUnspecified), Kind::kMatrix);
  EXPECT_EQ(*ResolveKind("w", {1, 1}, Kind::kScalar), Kind::kScalar);
}

// B-060: three dimensions are experts, a convolution or flattened, depending on who guesses.
TEST(ResolveKind, DeepSpeedOriginalMuon_ThreeDimensionsAreNeverGuessed) {
  EXPECT_STATUS(ResolveKind("moe.w1", {2, 2, 2}, Kind::kUnspecified), absl::IsInvalidArgument,
                "parameter \"moe.w1\": shape [2, 2, 2] without a kind: experts or conv would be a "
                "guess");
}

TEST(ResolveKind, RefusesKindsThatDoNotFitTheRank) {
  const struct {
    Dims shape;
    Kind kind;
  } cases[] = {{{2, 2, 2}, Kind::kMatrix}, {{4}, Kind::kMatrix},
               {{2, 2}, Kind::kExperts},   {{2, 2, 2, 2}, Kind::kExperts},
               {{2, 2}, Kind::kConv},      {{2, 2}, Kind::kVector},
               {{}, Kind::kVector},        {{2}, Kind::kScalar}};
  for (const auto& c : cases) {
    EXPECT_STATUS(
        ResolveKind("w", c.shape, c.kind), absl::IsInvalidArgument,
        "kind " + std::string(KindName(c.kind)) + " does not fit shape " + DimsToString(c.shape));
  }
}

TEST(MatrixBlocks, AMatrixIsOneBlock) {
  EXPECT_EQ(View({4, 3}, Kind::kMatrix), (Blocks{{4, 3, {{0, 4}}}}));
  EXPECT_EQ(View({4, 3}, Kind::kUnspecified), (Blocks{{4, 3, {{0, 4}}}}));
}

// B-060: each expert is orthogonalized on its own.
TEST(MatrixBlocks, PyTorch180561_ExpertsAreMatricesOfTheirOwn) {
  EXPECT_EQ(View({2, 2, 2}, Kind::kExperts), (Blocks{{2, 2, {{0, 2}}}, {2, 2, {{2, 2}}}}));
  EXPECT_EQ(View({3, 4, 5}, Kind::kExperts)[2], (MatrixBlock{4, 5, {{8, 4}}}));
}

// B-057: the factor belongs to the matrix out x (product of the rest), not to the kernel's extents.
TEST(MatrixBlocks, KellerJordanMuon63_AConvolutionIsOutTimesRest) {
  const Blocks wide = View({256, 16, 3, 3}, Kind::kConv);
  EXPECT_EQ(wide, (Blocks{{256, 144, {{0, 256}}}}));
  EXPECT_NEAR(OriginalFactor(wide[0]), 1.33333, 1e-5);
  const Blocks flat = View({64, 32, 3, 1}, Kind::kConv);
  EXPECT_EQ(flat, (Blocks{{64, 96, {{0, 64}}}}));
  EXPECT_EQ(OriginalFactor(flat[0]), 1.0);
}

TEST(MatrixBlocks, VectorsAndScalarsHaveNone) {
  EXPECT_STATUS(MatrixBlocks("b", {5}, Kind::kUnspecified, {}), absl::IsInvalidArgument,
                "parameter \"b\": a vector has no matrix view");
  EXPECT_STATUS(MatrixBlocks("b", {1, 1}, Kind::kScalar, {}), absl::IsInvalidArgument, "a scalar");
}

TEST(MatrixBlocks, EmptyTensorsHaveNoMatrices) {
  EXPECT_EQ(View({0, 3}, Kind::kMatrix), Blocks());
  EXPECT_EQ(View({4, 0, 3}, Kind::kExperts), Blocks());
}

// B-062: gated attention has four blocks; the sizes come with the parameter and must fit its rows.
TEST(MatrixBlocks, MegatronLm4731_SplitsMustTileTheRows) {
  EXPECT_STATUS(MatrixBlocks("qkv", {6, 2}, Kind::kMatrix, {{2, 2, 1}}), absl::IsInvalidArgument,
                "parameter \"qkv\": split: 1 group(s) of sizes [2, 2, 1], 5 rows each, don't tile "
                "the 6 rows");
  EXPECT_EQ(View({6, 2}, Kind::kMatrix, {{2, 2, 1, 1}}),
            (Blocks{{2, 2, {{0, 2}}}, {2, 2, {{2, 2}}}, {1, 2, {{4, 1}}}, {1, 2, {{5, 1}}}}));
  EXPECT_EQ(View({4608, 8}, Kind::kMatrix, {{2048, 2048, 256, 256}}).size(), 4u);
  EXPECT_FALSE(MatrixBlocks("qkv", {4608, 8}, Kind::kMatrix, {{2048, 256, 256}}).ok());
}

TEST(MatrixBlocks, SplitArithmeticCannotOverflow) {
  const std::int64_t big = std::int64_t{1} << 62;
  for (const RowSplit& split : {RowSplit{{big, big, big, big, 4}}, RowSplit{{big}, 4},
                                RowSplit{{4}, -1}, RowSplit{{5, -1}}, RowSplit{{4, 0}}}) {
    EXPECT_STATUS(MatrixBlocks("w", {4, 2}, Kind::kMatrix, split), absl::IsInvalidArgument,
                  "split");
  }
}

// B-063: the split is decided on the logical shape; which rank holds which rows is not even asked.
TEST(MatrixBlocks, MegatronLm7117_QkvRowsAreSplitOnTheLogicalShape) {
  EXPECT_EQ(View({4, 2}, Kind::kMatrix, {{2, 1, 1}}),
            (Blocks{{2, 2, {{0, 2}}}, {1, 2, {{2, 1}}}, {1, 2, {{3, 1}}}}));
}

TEST(MatrixBlocks, ContiguousGroupsOfABlockAreOneRange) {
  // Rows: q0 q0 q1 q1 k0 k1.
  EXPECT_EQ(View({6, 2}, Kind::kMatrix, {{2, 1}, 2}), (Blocks{{4, 2, {{0, 4}}}, {2, 2, {{4, 2}}}}));
}

TEST(MatrixBlocks, InterleavedGroupsAreGathered) {
  // Rows: q0 q0 k0 q1 q1 k1.
  EXPECT_EQ(View({6, 2}, Kind::kMatrix, {{2, 1}, 2, true}),
            (Blocks{{4, 2, {{0, 2}, {3, 2}}}, {2, 2, {{2, 1}, {5, 1}}}}));
  // A single block's parts touch: one range again.
  EXPECT_EQ(View({6, 2}, Kind::kMatrix, {{2}, 3, true}), (Blocks{{6, 2, {{0, 6}}}}));
}

TEST(MatrixBlocks, PerHeadEachGroupIsAMatrix) {
  const RowSplit contiguous{{2, 1}, 2, false, true};
  EXPECT_EQ(View({6, 2}, Kind::kMatrix, contiguous),
            (Blocks{{2, 2, {{0, 2}}}, {2, 2, {{2, 2}}}, {1, 2, {{4, 1}}}, {1, 2, {{5, 1}}}}));
  const RowSplit interleaved{{2, 1}, 2, true, true};
  EXPECT_EQ(View({6, 2}, Kind::kMatrix, interleaved),
            (Blocks{{2, 2, {{0, 2}}}, {2, 2, {{3, 2}}}, {1, 2, {{2, 1}}}, {1, 2, {{5, 1}}}}));
}

TEST(MatrixBlocks, EveryRowIsInExactlyOneBlockWhateverTheSplit) {
  for (const bool interleaved : {false, true}) {
    for (const bool per_head : {false, true}) {
      const Blocks blocks = View({3, 20, 2}, Kind::kExperts, {{3, 1, 1}, 4, interleaved, per_head});
      std::vector<int> seen(60);
      for (const MatrixBlock& block : blocks) {
        std::int64_t rows = 0;
        for (const RowRange& range : block.ranges) {
          rows += range.count;
          for (std::int64_t i = 0; i < range.count; ++i) ++seen.at(range.begin + i);
        }
        EXPECT_EQ(block.rows, rows);
        EXPECT_EQ(block.cols, 2);
      }
      EXPECT_EQ(seen, std::vector<int>(60, 1));
      EXPECT_EQ(blocks.size(), per_head ? 36u : 9u);
    }
  }
}

TEST(MatrixBlocks, RefusesToListMillionsOfMatrices) {
  EXPECT_STATUS(MatrixBlocks("w", {std::int64_t{1} << 29, 1, 1}, Kind::kExperts, {}),
                absl::IsResourceExhausted, "536870912 matrices");
  const RowSplit rows{{1}, std::int64_t{1} << 29, true, true};
  EXPECT_STATUS(MatrixBlocks("w", {std::int64_t{1} << 29, 1}, Kind::kMatrix, rows),
                absl::IsResourceExhausted, "parameter \"w\"");
}

TEST(Degenerate, IsARowOrAColumn) {
  EXPECT_TRUE(Degenerate(View({1, 9}, Kind::kMatrix)));
  EXPECT_TRUE(Degenerate(View({9, 1}, Kind::kMatrix)));
  EXPECT_TRUE(Degenerate(View({4, 1, 9}, Kind::kExperts)));
  EXPECT_FALSE(Degenerate(View({2, 2}, Kind::kMatrix)));
  EXPECT_TRUE(Degenerate(View({2, 2}, Kind::kMatrix, {{1, 1}})));
  EXPECT_FALSE(Degenerate(View({3, 2}, Kind::kMatrix, {{2, 1}})));
}

// B-059: one factor only, that of the rule (the base learning rate of the decay is the engine's).
TEST(ShapeFactorOf, Moonlight40_OneFactorOfTheMatrix) {
  EXPECT_EQ(ShapeFactorOf(ShapeFactor::kOriginal, 1, 4, 1), 2.0);
  EXPECT_EQ(ShapeFactorOf(ShapeFactor::kOriginal, 1, 4096, 1024), 2.0);
  EXPECT_EQ(ShapeFactorOf(ShapeFactor::kOriginal, 1, 1024, 4096), 1.0);
  EXPECT_DOUBLE_EQ(ShapeFactorOf(ShapeFactor::kMatchRmsAdamW, 1, 1024, 4096), 0.2 * 64);
  EXPECT_DOUBLE_EQ(ShapeFactorOf(ShapeFactor::kUnitRms, 1, 1024, 4096), 0.5);
  EXPECT_DOUBLE_EQ(ShapeFactorOf(ShapeFactor::kSpectralMax, 1, 1024, 4096), 64);
  EXPECT_EQ(ShapeFactorOf(ShapeFactor::kNone, 1, 1024, 4096), 1.0);
  EXPECT_EQ(ShapeFactorOf(ShapeFactor::kOriginal, 0.5, 4, 1), 1.0);
}

}  // namespace
}  // namespace muond
