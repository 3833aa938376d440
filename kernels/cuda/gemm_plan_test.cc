// Every box of every product is computed exactly once, whatever the tiles and the machine.
#include "kernels/cuda/gemm_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace muond::kernels::cuda {
namespace {

GemmOp Op(int rows, int cols, int k, bool symmetric) {
  GemmOp op;
  op.rows = rows;
  op.cols = cols;
  op.k = k;
  op.symmetric = symmetric ? 1 : 0;
  return op;
}

int Boxes(int side) { return (side + kBoxSide - 1) / kBoxSide; }

// How often each box of `op` is written, as the kernels do: a symmetric box above the diagonal also
// writes its mirror image, one below is left alone.
std::vector<int> Writes(const GemmPlan& plan, const GemmOp& op, int index) {
  std::vector<int> writes(static_cast<std::size_t>(Boxes(op.rows) * Boxes(op.cols)));
  const auto write = [&](int i, int j) {
    if (i < Boxes(op.rows) && j < Boxes(op.cols)) {
      ++writes[static_cast<std::size_t>(i * Boxes(op.cols) + j)];
    }
  };
  for (const GemmTile& tile : plan.tiles) {
    if (tile.op != index) continue;
    for (int i = 0; i < plan.cluster * kTileRows / kBoxSide; ++i) {
      for (int j = 0; j < tile.width / kBoxSide; ++j) {
        const int row = tile.row / kBoxSide + i, col = tile.column / kBoxSide + j;
        if (op.symmetric != 0 && col < row) continue;
        write(row, col);
        if (op.symmetric != 0 && col != row) write(col, row);
      }
    }
  }
  return writes;
}

void ExpectComplete(const std::vector<GemmOp>& ops, const GemmMachine& machine) {
  const GemmPlan plan = PlanGemm(ops, 7, machine);
  SCOPED_TRACE("width " + std::to_string(plan.width) + " cluster " + std::to_string(plan.cluster));
  ASSERT_GT(plan.groups, 0);
  EXPECT_LE(plan.groups * plan.cluster, machine.blocks);
  ASSERT_EQ(plan.begin.size(), static_cast<std::size_t>(plan.groups) + 1);
  EXPECT_TRUE(std::is_sorted(plan.begin.begin(), plan.begin.end()));
  EXPECT_EQ(plan.begin.front(), 0);
  EXPECT_EQ(plan.begin.back(), static_cast<int>(plan.tiles.size()));
  for (const GemmTile& tile : plan.tiles) {
    EXPECT_LE(tile.width, plan.width);
    EXPECT_EQ(tile.column % kBoxSide, 0);
    // gemm_sm90.cu has no such tiles, and the portable kernel no others than 128.
    EXPECT_FALSE(plan.cluster == 2 && tile.width % 128 != 0);
    EXPECT_TRUE(machine.hopper || tile.width == 128);
  }
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const auto writes = Writes(plan, ops[i], 7 + static_cast<int>(i));
    EXPECT_TRUE(std::all_of(writes.begin(), writes.end(), [](int n) { return n == 1; }))
        << ops[i].rows << " x " << ops[i].cols << " symmetric " << ops[i].symmetric;
  }
}

TEST(GemmPlan, WritesEveryBoxOnce) {
  for (const bool hopper : {false, true}) {
    for (const int cluster : {1, 2}) {
      for (const int width : {64, 128, 192, 256}) {
        if (!hopper && (cluster != 1 || width != 128)) continue;
        if (cluster == 2 && width % 128 != 0) continue;
        GemmMachine machine{132, hopper, width, cluster};
        for (const int side : {1, 3, 64, 65, 127, 129, 192, 256, 257, 768, 1000, 1408, 4097}) {
          ExpectComplete({Op(side, side, 100, true)}, machine);
          ExpectComplete({Op(side, 300, side, false)}, machine);
          ExpectComplete({Op(70, side, 1, false)}, machine);
        }
      }
    }
  }
}

TEST(GemmPlan, MixesProductsOfAnyShape) {
  const std::vector<GemmOp> ops = {Op(768, 768, 3072, true), Op(2304, 768, 768, false),
                                   Op(1, 3, 1, false), Op(129, 4097, 129, false),
                                   Op(2048, 2048, 64, true)};
  for (const int blocks : {2, 7, 132}) ExpectComplete(ops, {blocks, true, 0, 0});
  ExpectComplete(ops, {108, false, 0, 0});
}

TEST(GemmPlan, SharesTheWorkFairly) {
  // 72 tiles of 128 x 256 would leave half of the multiprocessors idle.
  const GemmPlan plan =
      PlanGemm(std::vector<GemmOp>{Op(2048, 2048, 2048, true)}, 0, {132, true, 0, 0});
  EXPECT_GT(plan.groups * plan.cluster, 90);
  // With many matrices the busiest block has hardly more than its share.
  const std::vector<GemmOp> many(32, Op(1024, 1024, 1024, true));
  const GemmPlan all = PlanGemm(many, 0, {132, true, 0, 0});
  double work = 0;
  for (const GemmOp& op : many) {
    work += PlanGemm(std::vector<GemmOp>{op}, 0, {1, true, 256, 1}).cycles / 132;
  }
  EXPECT_LT(all.cycles, 1.15 * work);
}

}  // namespace
}  // namespace muond::kernels::cuda
