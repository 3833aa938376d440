// What happens to the tiles of bf16 products: scaling, diagonal terms, rounding, mirroring.
//
// Compiled for AVX-512 and run only where HasBF16Products(). Like passes.h, this header has no
// inline functions. Strides in elements between rows. Any thread.
#pragma once

#include <cstdint>

namespace muond::kernels::cpu {

// A tile of a symmetric m x m matrix C = alpha P Q + ..., see products_bf16.h. All m x m pointers
// point to the tile's own first element, all vectors to the tile's first row or column.
struct SymmetricTile {
  const float* sums;  // of the products of P's and Q's off-diagonal parts, rows x cols without gaps
  std::int64_t rows, cols;
  bool on_diagonal;     // rows == cols; the part above the diagonal is ignored
  std::int64_t stride;  // m
  float alpha;
  const float* p;  // null: C = alpha P Q, and `q`, `left`, `right` are not looked at
  const float* q;
  const float* left;      // one per row, times Q
  const float* right;     // one per column, times P
  const float* addend;    // one per row, onto the diagonal; null: zeros
  float* full;            // the tile of C in fp32; null: not kept
  std::uint16_t* off;     // the tile of C in bf16, zeros on the diagonal
  std::uint16_t* mirror;  // where its transpose goes; on the diagonal the same as `off`
  float* diagonal;        // C's diagonal, one per row; written on the diagonal only
};
void FinishTile(const SymmetricTile& tile);

// A tile of X <- diag(factor) X + sums.
struct RowsTile {
  float* sums;  // rows x cols without gaps; overwritten
  std::int64_t rows, cols;
  const float* factor;  // one per row
  const float* x;
  std::int64_t x_stride;
  double x_scale;  // X is x times this, rounded to fp32
  float* out;      // may be x
  std::int64_t out_stride;
  bool out_transposed;     // `out` is the tile of the transpose
  std::uint16_t* rounded;  // the new X in bf16; null: not wanted
  std::int64_t rounded_stride;
};
void FinishTile(const RowsTile& tile);

// dst[i] = bf16(float(src[i] * scale)), the product in fp64.
void ScaleToBF16(std::uint16_t* dst, const float* src, double scale, std::int64_t elements);

}  // namespace muond::kernels::cpu
