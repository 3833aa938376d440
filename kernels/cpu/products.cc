// Tiled fp32 products.
//
// Tile sides by measurement (one Zen 5 core, m = 768 and 2048): lower triangles of tiles of up to
// 256, halved once more on the diagonal, take 0.56 of a full product's time; general tiles of up to
// 512 x 512 reach 95-100 % of the rate of one product over the whole matrix.
#include "kernels/cpu/products.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/tiles.h"

namespace muond::kernels::cpu {
namespace {

constexpr std::int64_t kTriangleTile = 256;
constexpr std::int64_t kGeneralTile = 512;
// Read and written pieces of both sides fit the first-level cache.
constexpr std::int64_t kTransposeTile = 64;

// beta D + diagonal I onto a tile whose product is in place; then the tile's mirror image.
void FinishTile(const Passes& passes, const SymmetricProduct& p, const Tile& tile, float* c) {
  const bool on_diagonal = tile.row == tile.col;
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const std::int64_t end = on_diagonal ? i + 1 : tile.cols;
    float* __restrict c_row = c + (tile.row + i) * p.m + tile.col;
    if (p.d != nullptr) {
      const float* __restrict d_row = p.d + (tile.row + i) * p.m + tile.col;
      for (std::int64_t j = 0; j < end; ++j) c_row[j] += p.beta * d_row[j];
    }
    if (on_diagonal) c_row[i] += p.diagonal;
  }
  if (!on_diagonal) {
    passes.transpose(c + tile.row * p.m + tile.col, p.m, tile.rows, tile.cols,
                     c + tile.col * p.m + tile.row, p.m);
    return;
  }
  for (std::int64_t i = tile.row; i < tile.row + tile.rows; ++i) {
    for (std::int64_t j = tile.row; j < i; ++j) c[j * p.m + i] = c[i * p.m + j];
  }
}

}  // namespace

void Multiply(const Loop& loop, const F32Gemm& gemm, const Passes& passes,
              const SymmetricProduct& product, float* c) {
  const SymmetricProduct& p = product;
  const Triangle triangle(p.m, kTriangleTile);
  loop.ForEach(triangle.count(), [&](std::size_t t) {
    triangle.ForEachPart(t, [&](const Tile& tile) {
      gemm.run({.b_transposed = true,
                .m = tile.rows,
                .n = tile.cols,
                .k = p.k,
                .alpha = p.alpha,
                .a = p.a + tile.row * p.k,
                .a_stride = p.k,
                .b = p.b + tile.col * p.k,
                .b_stride = p.k,
                .c = c + tile.row * p.m + tile.col,
                .c_stride = p.m});
      FinishTile(passes, p, tile, c);
    });
  });
}

void Multiply(const Loop& loop, const F32Gemm& gemm, const float* a, const float* x, std::int64_t m,
              std::int64_t n, float* y) {
  const Grid grid(m, kGeneralTile, n, kGeneralTile);
  loop.ForEach(grid.count(), [&](std::size_t t) {
    const Tile tile = grid[t];
    gemm.run({.m = tile.rows,
              .n = tile.cols,
              .k = m,
              .a = a + tile.row * m,
              .a_stride = m,
              .b = x + tile.col,
              .b_stride = n,
              .c = y + tile.row * n + tile.col,
              .c_stride = n});
  });
}

void Transpose(const Loop& loop, const Passes& passes, const float* src, std::int64_t m,
               std::int64_t n, float* dst) {
  const Grid grid(m, kTransposeTile, n, kTransposeTile);
  loop.ForEach(grid.count(), [&](std::size_t t) {
    const Tile tile = grid[t];
    passes.transpose(src + tile.row * n + tile.col, n, tile.rows, tile.cols,
                     dst + tile.col * m + tile.row, m);
  });
}

}  // namespace muond::kernels::cpu
