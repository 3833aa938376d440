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

// A U below the floor must not iterate as X = U / floor: an fp16 X could be all subnormal. So X is
// kept as OutputScale times a matrix X' that starts with a norm of 1; X X^T is in units of X, so
// that the coefficients stay what they are, and O comes out as X'. 1 at the floor and above. Small
// values grow by `growth`, the product of all a; where that is beyond fp16, X' starts smaller.
__host__ __device__ inline double OutputScale(double norm, double floor, double growth) {
  if (!(norm < floor)) return 1;
  constexpr double kLargest = 1 << 15;
  const double scale = norm / floor;
  const double bound = growth * scale < 1.5 ? growth : 1.5 / scale;  // of |X'|, at any step
  return bound > kLargest ? scale * (bound / kLargest) : scale;
}

// What products are multiplied with; all 0 where the norm is 0, all NaN where it is not finite.
struct NormScalars {
  float to_iterate = 0;     // X' = to_iterate U
  float squared = 0;        // X X^T = squared U U^T
  float scale_squared = 0;  // X X^T = scale_squared X' X'^T
  float to_normalized = 0;  // X = to_normalized U
};

// A matrix whose norm is wanted; in device memory.
struct NormJob {
  const __half* data = nullptr;
  std::int64_t elements = 0;
  double* partials = nullptr;     // one per piece
  std::uint32_t* done = nullptr;  // zero; zero again afterwards
  NormScalars* scalars = nullptr;
  double growth = 0;              // see OutputScale
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
// The reverse, o = x / scale, rounded to nearest even.
cudaError_t LaunchNarrow(__half* o, const float* x, double scale, std::int64_t rows,
                         std::int64_t cols, bool transposed, cudaStream_t stream);
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
