// The matrix products of Newton-Schulz in bf16 with fp32 sums.
//
// Rounding a matrix near s I to bf16 would make one common error of all its diagonal, and Gaussian
// gradients give just such matrices. So a symmetric matrix is split: its diagonal stays in fp32,
// and only the rest is rounded for the product,
//   P Q = offP offQ + diagP Q + P diagQ,
// where the last two terms are elementwise and use fp32 values off the diagonal as well. It brings
// the error of the whole iteration on Gaussian inputs from 1.5e-2 to 4e-3 and keeps null directions
// null (docs/kernels.md).
#pragma once

#include <cstdint>

#include "kernels/cpu/workers.h"

namespace muond::kernels::cpu {

// A symmetric m x m matrix. `full`: fp32, only below the diagonal. `off`: bf16, whole, zeros on the
// diagonal. `diagonal`: m values.
struct SplitMatrix {
  float* full = nullptr;
  std::uint16_t* off = nullptr;
  float* diagonal = nullptr;
};

// X, m x n, in fp32 and rounded to bf16. X = x times x_scale, rounded to fp32.
struct RoundedMatrix {
  const float* x = nullptr;
  double x_scale = 1;
  const std::uint16_t* rounded = nullptr;
};

// The coefficients of a Newton-Schulz step in fp32.
struct BF16Step {
  float a, b, c;
};

// Products of m x m matrices and of X. Overlap of results and operands is not allowed, except that
// the new X may overwrite X's fp32 values.
class BF16Products {
 public:
  // `vectors`: room for 3 m floats.
  BF16Products(const Loop& loop, std::int64_t m, std::int64_t n, float* vectors)
      : loop_(loop), m_(m), n_(n), left_(vectors), right_(vectors + m), addend_(vectors + 2 * m) {}

  // R = X X^T of the rounded X.
  void Gram(const std::uint16_t* x, const SplitMatrix& r) const;
  // Z = a I + b R + c R^2. `keep_full`: Z will be a factor of another symmetric product.
  void Step(const SplitMatrix& r, const BF16Step& step, bool keep_full, const SplitMatrix& z) const;
  // C = P Q, where P and Q commute.
  void Multiply(const SplitMatrix& p, const SplitMatrix& q, bool keep_full,
                const SplitMatrix& c) const;
  // X <- Q X to `out` and, unless null, to `rounded`. `transposed`: `out` is n x m.
  void MultiplyX(const SplitMatrix& q, const RoundedMatrix& x, float* out, bool transposed,
                 std::uint16_t* rounded) const;

 private:
  void MultiplySymmetric(const std::uint16_t* p, const std::uint16_t* q, std::int64_t k,
                         float alpha, const float* p_full, const float* q_full, bool keep_full,
                         const SplitMatrix& c) const;

  const Loop& loop_;
  std::int64_t m_, n_;
  float *left_, *right_, *addend_;
};

}  // namespace muond::kernels::cpu
