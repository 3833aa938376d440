// The matrix products of Newton-Schulz in fp32, cut into fixed output tiles.
//
// Matrices are dense, row-major, fp32. A tile's bits depend on the shape only, never on the number
// of threads.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/workers.h"

namespace muond::kernels::cpu {

// C = alpha A B^T + beta D + diagonal I, where that is known to be symmetric: A = B, or A and B are
// symmetric and commute. Only the lower triangle is computed, at half the cost, and mirrored, so C
// is symmetric to the bit. A, B: m x k; C, D: m x m; C overlaps none of them; D may be null.
struct SymmetricProduct {
  const float* a = nullptr;
  const float* b = nullptr;
  std::int64_t m = 0;
  std::int64_t k = 0;
  float alpha = 1;
  float beta = 0;
  const float* d = nullptr;
  float diagonal = 0;
};
void Multiply(const Loop& loop, const F32Gemm& gemm, const Passes& passes,
              const SymmetricProduct& product, float* c);

// Y = A X. A: m x m; X, Y: m x n, not overlapping.
void Multiply(const Loop& loop, const F32Gemm& gemm, const float* a, const float* x, std::int64_t m,
              std::int64_t n, float* y);

// dst = src^T. src: m x n, dst: n x m, not overlapping.
void Transpose(const Loop& loop, const Passes& passes, const float* src, std::int64_t m,
               std::int64_t n, float* dst);

}  // namespace muond::kernels::cpu
