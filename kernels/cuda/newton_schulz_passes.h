// The passes around the products of Newton-Schulz: norms, padding, and the fp32 standard form that
// redoes an implausible result. All are bound by memory but the last, which is rare.
//
// Sums are taken over fixed pieces of a matrix in a fixed order: they don't depend on the batch.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace muond::kernels::cuda {

inline constexpr std::int64_t kNormPiece = 32 * 1024;  // elements per block of a norm

// A matrix whose norm is wanted; in device memory.
struct NormJob {
  const __half* data = nullptr;
  std::int64_t elements = 0;
  double* partials = nullptr;     // one per piece
  std::uint32_t* done = nullptr;  // zero; zero again afterwards
  float* inverse = nullptr;       // 1 / max(norm, floor) and its square; 0 where the norm is 0
  const double* floor = nullptr;  // host memory that the device can read
  double* sum = nullptr;  // likewise: the sum of squares; NaN or infinite when an element is
};

struct NormPiece {
  std::int32_t job;
  std::int32_t piece;
};

// One block for each of `count` pieces.
cudaError_t LaunchNorms(const NormJob* jobs, const NormPiece* pieces, int count,
                        cudaStream_t stream);

// *to = the sum of `count` values; `to` is host memory that the device can write.
struct SumJob {
  const float* from = nullptr;
  std::int64_t count = 0;
  double* to = nullptr;
};
cudaError_t LaunchSums(const SumJob* jobs, int count, cudaStream_t stream);

// Rows of `cols` values, from one row stride to another.
cudaError_t LaunchCopyRows(__half* to, std::int64_t to_ld, const __half* from, std::int64_t from_ld,
                           std::int64_t rows, std::int64_t cols, cudaStream_t stream);

// *element = NaN, as a broken processor might leave it.
cudaError_t LaunchSpoil(__half* element, cudaStream_t stream);

// -- fp32. Matrices are row-major and contiguous.

// x = scale u; `transposed`: u is cols x rows.
cudaError_t LaunchWiden(float* x, const __half* u, const float* scale, std::int64_t rows,
                        std::int64_t cols, bool transposed, cudaStream_t stream);
// The reverse, rounded to nearest even.
cudaError_t LaunchNarrow(__half* o, const float* x, std::int64_t rows, std::int64_t cols,
                         bool transposed, cudaStream_t stream);
// d = alpha A B + beta C, d of rows x cols; b_transposed: B is stored cols x k. `c` may be null.
struct Fp32Product {
  const float* a = nullptr;
  const float* b = nullptr;
  const float* c = nullptr;
  float* d = nullptr;
  std::int64_t rows = 0, cols = 0, k = 0;
  bool b_transposed = false;
  float alpha = 1, beta = 0;
};
cudaError_t LaunchFp32Product(const Fp32Product& product, cudaStream_t stream);

}  // namespace muond::kernels::cuda
