// The kernel behind gemm.h for every device of compute capability 8.0 and up: mma.sync, 128 x 128
// tiles by eight warps of 32 x 64, operands through a ring of asynchronous copies. It reads any
// layout without transposing: ldmatrix transposes on the way where k is the outer dimension.
#include <cuda_fp16.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/gemm.h"

namespace muond::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;
constexpr int kStep = 32;  // k per stage
constexpr int kStages = 3;
constexpr int kChunk = 8;  // values of 16 bytes
constexpr std::uint32_t kOperandBytes = kTile * kStep * 2;

__device__ __forceinline__ void CopyChunk(std::uint32_t to, const __half* from, int values) {
  const int bytes = min(max(values, 0), kChunk) * 2;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(std::uint32_t (&r)[4], std::uint32_t from) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
  }
}

__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a chunk of 8 values lies in a stage. k inner: 128 lines of 32 values of k; k outer: 32
// lines of 128. The chunks of a line are permuted so that eight lines never meet in one bank.
template <bool kOuter>
__device__ __forceinline__ std::uint32_t ChunkOffset(int line, int chunk) {
  return kOuter ? line * 256 + ((chunk ^ (line & 7)) << 4)
                : line * 64 + ((chunk ^ ((line >> 1) & 3)) << 4);
}

// Asks for 128 rows from `row` and 32 values of k of one operand.
template <bool kOuter>
__device__ __forceinline__ void CopyOperand(std::uint32_t to, const GemmOperand& operand, int row,
                                            int rows, int k, int k_end) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    const int line = kOuter ? index / 16 : index / 4;
    const int chunk = kOuter ? index % 16 : index % 4;
    const int y = kOuter ? k + line : row + line;
    const int x = (kOuter ? row : k) + chunk * kChunk;
    const int y_end = kOuter ? k_end : rows;
    const int values = y < y_end ? (kOuter ? rows : k_end) - x : 0;
    // Nothing is read where nothing is wanted, but the address must be a valid one.
    const std::int64_t at = values > 0 ? y * operand.ld + x : 0;
    CopyChunk(to + ChunkOffset<kOuter>(line, chunk), operand.data + at, values);
  }
}

// Fragments of A for 16 rows from `row`, of B for 16 columns from `row`, 16 values of k from `k`.
template <bool kOuter, bool kIsA>
__device__ __forceinline__ void LoadFragments(std::uint32_t (&r)[4], std::uint32_t from, int row,
                                              int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int line = lane % 8, first = lane / 8 % 2, second = lane / 16;
  const int row_part = kIsA ? first : second, k_part = kIsA ? second : first;
  if constexpr (kOuter) {
    LoadMatrices<true>(r, from + ChunkOffset<true>(k + 8 * k_part + line, row / 8 + row_part));
  } else {
    LoadMatrices<false>(r, from + ChunkOffset<false>(row + 8 * row_part + line, k / 8 + k_part));
  }
}

using Accumulators = float[2][8][4];

template <bool kAOuter, bool kBOuter>
__device__ __forceinline__ void MultiplyTile(Accumulators& d, std::uint32_t shared,
                                             const GemmOp& op, int row, int column) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 64;
  const int steps = (op.k + kStep - 1) / kStep;
  const auto copy = [&](int step) {
    const std::uint32_t to = shared + step % kStages * 2 * kOperandBytes;
    if (step < steps) {
      CopyOperand<kAOuter>(to, op.a, row, op.rows, step * kStep, op.k);
      CopyOperand<kBOuter>(to + kOperandBytes, op.b, column, op.cols, step * kStep, op.k);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int step = 0; step < kStages - 1; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    copy(step + kStages - 1);
    const std::uint32_t from = shared + step % kStages * 2 * kOperandBytes;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      std::uint32_t a[2][4], b[4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) LoadFragments<kAOuter, true>(a[i], from, warp_row + 16 * i, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        LoadFragments<kBOuter, false>(b[j], from + kOperandBytes, warp_column + 16 * j, k);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          MultiplyAdd(d[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
}

// One pair of neighbours in a row, finished and written.
__device__ __forceinline__ float2 WritePair(const GemmOp& op, float scale, float x, float y,
                                            int row, int column) {
  x *= op.alpha;
  y *= op.alpha;
  if (op.c != nullptr && row < op.rows && column < op.cols) {
    const __half2 c =
        *reinterpret_cast<const __half2*>(op.c + static_cast<std::int64_t>(row) * op.ldc + column);
    x += op.beta * __low2float(c);
    y += op.beta * __high2float(c);
  }
  x = scale * x + (row == column ? op.diagonal : 0);
  y = scale * y + (row == column + 1 ? op.diagonal : 0);
  const __half2 pair = __floats2half2_rn(x, y);
  const auto write = [&](__half value, int at) {
    if (row >= op.rows || at >= op.cols) return;
    // Of a symmetric result one triangle is written twice, so that it is exactly symmetric.
    if (op.symmetric == 0 || at >= row) op.d.data[row * op.d.ld + at] = value;
    if (op.symmetric != 0 && at > row) op.d.data[at * op.d.ld + row] = value;
  };
  write(__low2half(pair), column);
  write(__high2half(pair), column + 1);
  return {x, y};
}

__device__ __forceinline__ void FinishTile(const Accumulators& d, const GemmOp& op, int row,
                                           int column) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = row + warp / 2 * 32, x = column + warp % 2 * kBoxSide;
  const int box_row = warp_row / kBoxSide * kBoxSide;
  // Below the diagonal boxes come from their mirror images, beyond the edge there are none.
  if (box_row >= op.rows || x >= op.cols || (op.symmetric != 0 && x < box_row)) return;
  const float scale = op.scale == nullptr ? 1.0f : *op.scale;
  const int boxes = (op.cols + kBoxSide - 1) / kBoxSide;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 v = WritePair(op, scale, d[i][j][2 * h], d[i][j][2 * h + 1],
                                   warp_row + 16 * i + 8 * h + lane / 4, x + 8 * j + lane % 4 * 2);
        sum += v.x * v.x + v.y * v.y;
      }
    }
    if (op.sums == nullptr) continue;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    const int box = box_row / kBoxSide * boxes + x / kBoxSide;
    if (lane == 0) op.sums[box * 4 + (warp_row - box_row) / 16 + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) PortableKernel(const GemmLaunch launch) {
  __shared__ __align__(128) std::uint8_t memory[kStages * 2 * kOperandBytes];
  const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
  for (int i = launch.begin[blockIdx.x]; i < launch.begin[blockIdx.x + 1]; ++i) {
    const GemmTile& tile = launch.tiles[i];
    const GemmOp& op = launch.ops[tile.op];
    Accumulators d = {};
    if (op.layout == GemmLayout::kNT) {
      MultiplyTile<false, false>(d, shared, op, tile.row, tile.column);
    } else if (op.layout == GemmLayout::kNN) {
      MultiplyTile<false, true>(d, shared, op, tile.row, tile.column);
    } else {
      MultiplyTile<true, true>(d, shared, op, tile.row, tile.column);
    }
    FinishTile(d, op, tile.row, tile.column);
  }
}

}  // namespace

Error LaunchGemmPortable(const GemmLaunch& launch, cudaStream_t stream) {
  PortableKernel<<<static_cast<unsigned>(launch.groups), kThreads, 0, stream>>>(launch);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return {};
  return Error(std::string("gemm launch: ") + cudaGetErrorString(status));
}

}  // namespace muond::kernels::cuda
