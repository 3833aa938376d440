// Tiles of bf16 products: the library's product into a buffer of this thread, then bf16_tiles.h.
#include "kernels/cpu/products_bf16.h"

#include <new>

#include "kernels/cpu/bf16_tiles.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/tiles.h"
#include "kernels/host_memory.h"

namespace muond::kernels::cpu {
namespace {

// By measurement, as in products.cc; the sums of a tile must stay in the second-level cache.
constexpr std::int64_t kTriangleTile = 256;
constexpr std::int64_t kRowsTile = 256;
constexpr std::int64_t kColsTile = 512;

// Room for the sums of one tile, kept by each thread.
float* TileSums() {
  thread_local HostScratch scratch;
  float* sums = scratch.Reserve(static_cast<std::size_t>(kRowsTile * kColsTile));
  if (sums == nullptr) throw std::bad_alloc();
  return sums;
}

}  // namespace

void BF16Products::MultiplySymmetric(const std::uint16_t* p, const std::uint16_t* q, std::int64_t k,
                                     float alpha, const float* p_full, const float* q_full,
                                     bool keep_full, const SplitMatrix& c) const {
  const Triangle triangle(m_, kTriangleTile);
  loop_.ForEach(triangle.count(), [&](std::size_t t) {
    float* sums = TileSums();
    triangle.ForEachPart(t, [&](const Tile& tile) {
      const BF16Gemm& gemm = BF16Gemm::For({.b_transposed = true,
                                            .m = tile.rows,
                                            .n = tile.cols,
                                            .k = k,
                                            .a_stride = k,
                                            .b_stride = k});
      gemm.Run(p + tile.row * k, q + tile.col * k, sums);
      const std::int64_t at = tile.row * m_ + tile.col;
      const bool product_only = p_full == nullptr;
      FinishTile(SymmetricTile{
          .sums = sums,
          .rows = tile.rows,
          .cols = tile.cols,
          .on_diagonal = tile.row == tile.col,
          .stride = m_,
          .alpha = alpha,
          .p = product_only ? nullptr : p_full + at,
          .q = product_only ? nullptr : q_full + at,
          .left = left_ + tile.row,
          .right = right_ + tile.col,
          .addend = product_only ? nullptr : addend_ + tile.row,
          .full = keep_full ? c.full + at : nullptr,
          .off = c.off + at,
          .mirror = c.off + tile.col * m_ + tile.row,
          .diagonal = c.diagonal + tile.row,
      });
    });
  });
}

void BF16Products::Gram(const std::uint16_t* x, const SplitMatrix& r) const {
  MultiplySymmetric(x, x, n_, 1.0f, nullptr, nullptr, true, r);
}

void BF16Products::Step(const SplitMatrix& r, const BF16Step& step, bool keep_full,
                        const SplitMatrix& z) const {
  const auto& [a, b, c] = step;
  for (std::int64_t i = 0; i < m_; ++i) {
    const float d = r.diagonal[i];
    // b R is shared out between the two terms that multiply R.
    left_[i] = right_[i] = c * d + 0.5f * b;
    addend_[i] = (c * d + b) * d + a;
  }
  MultiplySymmetric(r.off, r.off, m_, c, r.full, r.full, keep_full, z);
}

void BF16Products::Multiply(const SplitMatrix& p, const SplitMatrix& q, bool keep_full,
                            const SplitMatrix& c) const {
  for (std::int64_t i = 0; i < m_; ++i) {
    left_[i] = p.diagonal[i];
    right_[i] = q.diagonal[i];
    addend_[i] = p.diagonal[i] * q.diagonal[i];
  }
  MultiplySymmetric(p.off, q.off, m_, 1.0f, p.full, q.full, keep_full, c);
}

void BF16Products::MultiplyX(const SplitMatrix& q, const RoundedMatrix& x, float* out,
                             bool transposed, std::uint16_t* rounded) const {
  const Grid grid(m_, kRowsTile, n_, kColsTile);
  loop_.ForEach(grid.count(), [&](std::size_t t) {
    float* sums = TileSums();
    const Tile tile = grid[t];
    const BF16Gemm& gemm =
        BF16Gemm::For({.m = tile.rows, .n = tile.cols, .k = m_, .a_stride = m_, .b_stride = n_});
    gemm.Run(q.off + tile.row * m_, x.rounded + tile.col, sums);
    const std::int64_t at = tile.row * n_ + tile.col;
    FinishTile(RowsTile{
        .sums = sums,
        .rows = tile.rows,
        .cols = tile.cols,
        .factor = q.diagonal + tile.row,
        .x = x.x + at,
        .x_stride = n_,
        .x_scale = x.x_scale,
        .out = out + (transposed ? tile.col * m_ + tile.row : at),
        .out_stride = transposed ? m_ : n_,
        .out_transposed = transposed,
        .rounded = rounded == nullptr ? nullptr : rounded + at,
        .rounded_stride = n_,
    });
  });
}

}  // namespace muond::kernels::cpu
