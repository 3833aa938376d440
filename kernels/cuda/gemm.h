// Products of fp16 matrices, many at once, in any mixture of shapes: what one launch computes.
//
// A launch is a list of operations (GemmOp: one product each) cut into tiles (GemmTile) that are
// dealt to the blocks of a persistent kernel. Everything is a table in device memory, prepared once
// per set of shapes (gemm_plan.h) and replayed, so a launch has no host work and any matrices can
// share it. fp16 in, fp32 accumulation in order of k, fp16 out. The value of an element does not
// depend on the tile that it is computed in, so neither on what else is in the launch.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace muond::kernels::cuda {

// How the operands of D = A B lie in memory. All matrices are row-major.
enum class GemmLayout : std::int32_t {
  kNT = 0,  // A is rows x k, B is stored as cols x k
  kNN = 1,  // A is rows x k, B is k x cols
  kTN = 2,  // A is stored as k x rows, B is k x cols
};

// A matrix in device memory, aligned to 16 bytes; `ld`, the row stride in elements, is a multiple
// of 8. `map` lies in device memory, too, and comes from EncodeMatrixMap; only the Hopper kernel
// reads it, and only the others read the rest.
struct GemmOperand {
  const CUtensorMap* map = nullptr;
  __half* data = nullptr;
  std::int64_t ld = 0;
};

// D[i][j] = s (alpha sum_k A[i][k] B[k][j] + beta C[i][j]) + (i == j ? diagonal : 0), s = *scale.
struct alignas(16) GemmOp {
  GemmOperand a, b, d;
  const __half* c = nullptr;     // rows x cols, laid out as an operand; null: no such term
  const float* scale = nullptr;  // device scalar; null: 1
  float* sums = nullptr;         // sums of D^2, see SumsOf; null: not wanted; not with c
  std::int32_t ldc = 0;
  float alpha = 1;
  float beta = 0;
  float diagonal = 0;
  std::int32_t rows = 0;
  std::int32_t cols = 0;
  std::int32_t k = 0;
  GemmLayout layout = GemmLayout::kNT;
  std::int32_t symmetric = 0;  // D is symmetric: tiles of the upper triangle write both sides
  std::int32_t reserved = 0;
};

// A tile of kTileRows (times the cluster size) rows and `width` columns from (row, column).
struct alignas(16) GemmTile {
  std::int32_t op;
  std::int32_t row;
  std::int32_t column;
  std::int32_t width;  // 64, 128, 192 or 256
  GemmLayout layout;   // of the op
  std::int32_t steps;  // k of the op in units of 64, rounded up
  std::int32_t reserved[2];
};

inline constexpr int kTileRows = 128;
inline constexpr int kBoxSide = 64;  // matrices move in boxes of 64 x 64 values

// D^2 is summed in fp32 per quarter (16 rows) of a box; sums[(box row * box columns + box column) *
// 4 + quarter]. This many floats for a rows x cols matrix.
inline constexpr std::size_t SumsOf(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>((rows + kBoxSide - 1) / kBoxSide) *
         static_cast<std::size_t>((cols + kBoxSide - 1) / kBoxSide) * 4;
}

// One launch: blocks (or clusters) i works on tiles [begin[i], begin[i + 1]).
struct GemmLaunch {
  const GemmTile* tiles = nullptr;
  const std::int32_t* begin = nullptr;
  const GemmOp* ops = nullptr;
  int groups = 0;   // blocks / cluster
  int cluster = 1;  // 1 or 2
  int width = 256;  // of the widest tile
};

// The map of a rows x cols matrix with row stride `ld` elements for boxes of 64 x 64. `data` must
// be aligned to 16 bytes and `ld` be a multiple of 8.
Error EncodeMatrixMap(CUtensorMap* map, const __half* data, std::int64_t rows, std::int64_t cols,
                      std::int64_t ld);

// Raises the kernels' shared memory limit; once per device before the first launch.
Error PrepareGemmSm90();

// Enqueue the launch. The Hopper kernel's start overlaps the end of the kernel in front of it.
// The portable one, for other devices of compute capability 8.0 and up, takes tiles of width 128
// and cluster 1 only.
Error LaunchGemmSm90(const GemmLaunch& launch, cudaStream_t stream);
Error LaunchGemmPortable(const GemmLaunch& launch, cudaStream_t stream);

}  // namespace muond::kernels::cuda
