// One matrix product on the calling thread alone: fp32 by oneDNN or OpenBLAS, bf16 by oneDNN.
//
// The tiles of products.h and products_bf16.h are what runs in parallel; a library's own threads
// would cut the sums differently with the core count. The same call gives the same bits on the same
// processor. Any thread. Failures, out of memory in the main, are thrown (std::exception).
#pragma once

#include <cstdint>
#include <tuple>

namespace muond::kernels::cpu {

// C (m x n) = alpha A B, or alpha A B^T; A is m x k. Row-major, strides in elements between rows.
struct F32Product {
  bool b_transposed = false;
  std::int64_t m = 0, n = 0, k = 0;
  float alpha = 1;
  const float* a = nullptr;
  std::int64_t a_stride = 0;
  const float* b = nullptr;
  std::int64_t b_stride = 0;
  float* c = nullptr;
  std::int64_t c_stride = 0;
};

struct F32Gemm {
  const char* library;
  void (*run)(const F32Product& product);
};

// OpenBLAS. Its thread count, one number for the whole process, is set to 1 by every call.
const F32Gemm& OpenBlasGemm();
// oneDNN where the processor has AVX-512 (twice the rate of Debian's OpenBLAS on Zen 5, whatever
// kernels that one picks), else OpenBLAS.
const F32Gemm& FastestF32Gemm();

// True when the processor multiplies bf16 (AVX512_BF16 or AMX).
bool HasBF16Products();
// "AMX bf16", "AVX-512 bf16", or "none".
const char* BF16InstructionSet();

// C (m x n, fp32, rows without gaps) = A B or A B^T with A, B in bf16 and sums in fp32. Strides as
// above. Only where HasBF16Products().
struct BF16Shape {
  bool b_transposed = false;
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t a_stride = 0, b_stride = 0;

  friend bool operator<(const BF16Shape& x, const BF16Shape& y) {
    const auto all = [](const BF16Shape& s) {
      return std::tie(s.b_transposed, s.m, s.n, s.k, s.a_stride, s.b_stride);
    };
    return all(x) < all(y);
  }
};

// The code generated for one shape; made once per process and shape, and kept.
class BF16Gemm {
 public:
  virtual ~BF16Gemm() = default;
  virtual void Run(const std::uint16_t* a, const std::uint16_t* b, float* c) const = 0;

  static const BF16Gemm& For(const BF16Shape& shape);
};

}  // namespace muond::kernels::cpu
