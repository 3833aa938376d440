// Every tile to the group that is done first, for every width and cluster size worth trying.
#include "kernels/cuda/gemm_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace muond::kernels::cuda {
namespace {

constexpr int kWidths[] = {256, 192, 128, 64};

// Groups work side by side; a band of this many tile rows keeps what they read in the L2 cache.
constexpr int kBandRows = 8;

// Tiles of each group that are dealt by their length.
constexpr double kTailTiles = 2;

// Cycles of one step of 64 in k and of the rest of a tile, fitted to measurements on an H200
// (kernels/lab/README.md).
double TileCycles(int width, int cluster, int steps) {
  const double step = width == 256   ? (cluster == 2 ? 1060 : 1120)
                      : width == 192 ? (cluster == 2 ? 830 : 900)
                      : width == 128 ? (cluster == 2 ? 600 : 620)
                                     : 400;
  return step * steps + 1200 + 8.0 * width;
}

// Clusters have no tiles of 192 columns, which were never the best, nor of 64; the portable kernel
// has tiles of 128 only.
bool IsKnown(const GemmMachine& machine, int width, int cluster) {
  return width == 128 || (machine.hopper && (cluster == 1 || width == 256));
}

// The narrowest tile that covers `columns`, at most `widest`.
int WidthFor(int columns, int widest, const GemmMachine& machine, int cluster) {
  int width = widest;
  for (const int narrower : kWidths) {
    if (narrower <= widest && narrower >= columns && IsKnown(machine, narrower, cluster)) {
      width = narrower;
    }
  }
  return width;
}

void AppendTiles(const GemmOp& op, int index, int width, const GemmMachine& machine, int cluster,
                 std::vector<GemmTile>* tiles) {
  const int height = kTileRows * cluster;
  const int band = kBandRows / cluster * height;
  const int steps = (op.k + kBoxSide - 1) / kBoxSide;
  // Tile columns are counted from the diagonal in the symmetric case, so that the triangle is cut
  // at its edge and only its last tiles are narrow.
  const int columns = (op.cols + width - 1) / width;
  for (int top = 0; top < op.rows; top += band) {
    for (int column = 0; column < columns; ++column) {
      for (int row = top; row < std::min(op.rows, top + band); row += height) {
        const int at = column * width + (op.symmetric != 0 ? row : 0);
        if (at >= op.cols) continue;
        tiles->push_back({index,
                          row,
                          at,
                          WidthFor(op.cols - at, width, machine, cluster),
                          op.layout,
                          steps,
                          {}});
      }
    }
  }
}

GemmPlan Deal(std::vector<GemmTile> tiles, int groups, int cluster) {
  const auto cycles = [cluster](const GemmTile& tile) {
    return TileCycles(tile.width, cluster, tile.steps);
  };
  // In the order of the matrices, so that what a matrix reads is in the L2 cache while it is worked
  // on; the last two tiles of each group, about, longest first, so that all end together.
  double rest = 0, longest = 0;
  for (const GemmTile& tile : tiles) {
    rest += cycles(tile);
    longest = std::max(longest, cycles(tile));
  }
  auto tail = tiles.begin();
  for (; tail != tiles.end() && rest > kTailTiles * groups * longest; ++tail) rest -= cycles(*tail);
  std::stable_sort(tail, tiles.end(),
                   [&](const GemmTile& x, const GemmTile& y) { return cycles(x) > cycles(y); });
  groups = std::min<int>(groups, static_cast<int>(tiles.size()));
  using Load = std::pair<double, int>;
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int i = 0; i < groups; ++i) loads.push({0, i});
  std::vector<std::vector<GemmTile>> dealt(static_cast<std::size_t>(groups));
  for (const GemmTile& tile : tiles) {
    auto [load, group] = loads.top();
    loads.pop();
    dealt[static_cast<std::size_t>(group)].push_back(tile);
    loads.push({load + cycles(tile), group});
  }
  GemmPlan plan;
  plan.groups = groups;
  plan.cluster = cluster;
  for (const GemmTile& tile : tiles) plan.width = std::max(plan.width, tile.width);
  plan.begin.push_back(0);
  for (const auto& list : dealt) {
    plan.tiles.insert(plan.tiles.end(), list.begin(), list.end());
    plan.begin.push_back(static_cast<std::int32_t>(plan.tiles.size()));
  }
  while (!loads.empty()) {
    plan.cycles = loads.top().first;
    loads.pop();
  }
  return plan;
}

}  // namespace

GemmPlan PlanGemm(std::span<const GemmOp> ops, int first_op, const GemmMachine& machine) {
  GemmPlan best;
  for (const int cluster : {2, 1}) {
    if (cluster == 2 && !machine.hopper) continue;
    if (machine.only_cluster != 0 && machine.only_cluster != cluster) continue;
    for (const int width : kWidths) {
      if (!IsKnown(machine, width, cluster)) continue;
      if (machine.only_width != 0 && machine.only_width != width) continue;
      std::vector<GemmTile> tiles;
      for (std::size_t i = 0; i < ops.size(); ++i) {
        AppendTiles(ops[i], first_op + static_cast<int>(i), width, machine, cluster, &tiles);
      }
      GemmPlan plan = Deal(std::move(tiles), machine.blocks / cluster, cluster);
      if (best.width == 0 || plan.cycles < best.cycles) best = std::move(plan);
    }
  }
  return best;
}

}  // namespace muond::kernels::cuda
