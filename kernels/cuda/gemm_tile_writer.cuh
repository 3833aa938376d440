// From accumulators to memory: the end of a tile in gemm_sm90.cu.
//
// A consumer warpgroup holds 64 rows of the tile in up to four boxes of 64 columns; warp w has rows
// 16 w and on. Values leave through shared memory, so that global memory sees whole lines of 128
// bytes (sectors of 32 were three times slower), and for a symmetric result a second time,
// transposed; only that makes the warps of the group wait for each other. The code is kept short
// (terms that few products have come in passes of their own): a block runs through it once per tile
// and waits for every instruction that the caches lost meanwhile.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_sm90_ptx.cuh"

namespace muond::kernels::cuda::sm90 {

// On their way out are, for each warp, 16 x 64 values, and for each warpgroup 64 columns of 64.
inline constexpr std::uint32_t kRowsBytes = 16 * kBoxSide * 2;
inline constexpr std::uint32_t kColumnsBytes = kBoxSide * kBoxSide * 2;
inline constexpr std::uint32_t kGroupOutBytes = 4 * kRowsBytes + kColumnsBytes;

// The part of GemmOp that the end of a tile needs.
struct Finish {
  __device__ __forceinline__ explicit Finish(const GemmOp& op)
      : d(op.d.data),
        c(op.c),
        sums(op.sums),
        ldd(static_cast<int>(op.d.ld)),
        ldc(op.ldc),
        rows(op.rows),
        cols(op.cols),
        alpha(op.alpha),
        beta(op.beta),
        diagonal(op.diagonal),
        scale(op.scale == nullptr ? 1.0f : __ldg(op.scale)),
        symmetric(op.symmetric != 0) {}

  __half* d;
  const __half* c;
  float* sums;
  int ldd, ldc, rows, cols;
  float alpha, beta, diagonal, scale;
  bool symmetric;
};

class TileWriter {
 public:
  // `out`: shared memory of kGroupOutBytes for the warpgroup, aligned to 1024; `barrier` is free
  // for it to wait at.
  __device__ __forceinline__ TileWriter(std::uint32_t out, int barrier) : barrier_(barrier) {
    const std::uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const std::uint32_t line = lane % 8, h = lane / 8 % 2, next = lane / 16;
    // Lines of 128 bytes, their pieces of 16 bytes permuted by the number of the line.
    const std::uint32_t rows = out + warp * kRowsBytes;
    const std::uint32_t columns = out + 4 * kRowsBytes;
    put_row_ = rows + (8 * h + line) * 128 + ((next ^ line) << 4);
    take_row_ = rows + lane / 8 * 128 + ((line ^ (lane / 8)) << 4);
    put_column_ = columns + (8 * next + line) * 128 + (((2 * warp + h) ^ line) << 4);
    take_column_ = columns + (16 * warp + lane / 8) * 128 + ((line ^ (lane / 8)) << 4);
  }

  // `row` is the warpgroup's first; `boxes` of d are there.
  __device__ __forceinline__ void Finish(float (&d)[128], const struct Finish& finish, int row,
                                         int column, int boxes) const {
    float factor = finish.scale * finish.alpha;
    if (row >= finish.rows) return;
    const int warp_row = row + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    if (finish.c != nullptr) {
      AddC<0>(d, finish, warp_row, column, boxes);
      AddC<2>(d, finish, warp_row, column, boxes);
      factor = 1;
    } else if (finish.sums != nullptr) {
      AddSums(d, finish, factor, row, column, boxes);
    }
    WriteBox<0>(d, finish, factor, row, warp_row, column, boxes);
    WriteBox<1>(d, finish, factor, row, warp_row, column, boxes);
    WriteBox<2>(d, finish, factor, row, warp_row, column, boxes);
    WriteBox<3>(d, finish, factor, row, warp_row, column, boxes);
  }

 private:
  // Two boxes of d <- scale (alpha d + beta C) + diagonal. C comes in whole lines, as values leave,
  // and all of it is asked for before any is used.
  template <int kBox>
  __device__ __forceinline__ void AddC(float (&d)[128], const struct Finish& finish, int warp_row,
                                       int column, int boxes) const {
    if (kBox >= boxes) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = column + kBox * kBoxSide;
    uint4 lines[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = warp_row + i % 4 * 4 + lane / 8;
      const int at = first + i / 4 * kBoxSide + lane % 8 * 8;
      lines[i] = {};
      if (row < finish.rows && at < finish.cols) {
        lines[i] = __ldg(reinterpret_cast<const uint4*>(
            finish.c + static_cast<std::int64_t>(row) * finish.ldc + at));
      }
    }
    AddLines<kBox>(d, lines, finish, warp_row, first);
    AddLines<kBox + 1>(d, lines + 4, finish, warp_row, first + kBoxSide);
  }

  template <int kBox>
  __device__ __forceinline__ void AddLines(float (&d)[128], const uint4* lines,
                                           const struct Finish& finish, int warp_row,
                                           int column) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) StoreShared((take_row_ ^ (i % 2 * 64)) + i * 512, lines[i]);
    __syncwarp();
    std::uint32_t c[16];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) LoadMatrices(&c[4 * j], put_row_ ^ (j << 5));
    const float alpha = finish.scale * finish.alpha, beta = finish.scale * finish.beta;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int below = warp_row + lane / 4 - column - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&c[i]));
      float& x = d[kBox * 32 + 2 * i];
      float& y = d[kBox * 32 + 2 * i + 1];
      x = alpha * x + beta * pair.x;
      y = alpha * y + beta * pair.y;
      if (below + i % 2 * 8 == i / 2 * 8) x += finish.diagonal;
      if (below + i % 2 * 8 == i / 2 * 8 + 1) y += finish.diagonal;
    }
  }

  // Sums of squares per warp and box; fp32 values before rounding.
  __device__ __forceinline__ static void AddSums(const float (&d)[128], const struct Finish& finish,
                                                 float factor, int row, int column, int boxes) {
    const int first =
        row / kBoxSide * ((finish.cols + kBoxSide - 1) / kBoxSide) + column / kBoxSide;
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      if (box >= boxes || column + box * kBoxSide >= finish.cols) continue;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float x = factor * d[box * 32 + i];
        sum += x * x;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (threadIdx.x % 32 == 0) finish.sums[(first + box) * 4 + threadIdx.x / 32 % 4] = sum;
    }
  }

  template <int kBox>
  __device__ __forceinline__ void WriteBox(const float (&d)[128], const struct Finish& finish,
                                           float factor, int row, int warp_row, int column,
                                           int boxes) const {
    const int x = column + kBox * kBoxSide;
    // Below the diagonal boxes come from their mirror images, beyond the edge there are none.
    if (kBox >= boxes || x >= finish.cols || (finish.symmetric && x < row)) return;
    std::uint32_t r[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const __half2 pair =
          __floats2half2_rn(factor * d[kBox * 32 + 2 * i], factor * d[kBox * 32 + 2 * i + 1]);
      r[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) StoreMatrices(put_row_ ^ (j << 5), &r[4 * j]);
    if (finish.symmetric) PutColumns(r);
    if (finish.symmetric && x == row) return WriteDiagonalBox(finish, row, warp_row);
    __syncwarp();
    SendLines(take_row_, finish, warp_row + lane / 8, x + lane % 8 * 8);
    if (!finish.symmetric) return;
    SendLines(take_column_, finish, x + (warp_row - row) + lane / 8, row + lane % 8 * 8);
  }

  // The box's columns as lines, of all warps.
  __device__ __forceinline__ void PutColumns(const std::uint32_t (&r)[16]) const {
    NamedBarrier(barrier_, kGroupThreads);  // what was here has been taken
#pragma unroll
    for (int i = 0; i < 4; ++i) StoreMatricesTransposed(put_column_ + i * 16 * 128, &r[4 * i]);
    NamedBarrier(barrier_, kGroupThreads);
  }

  // Below the diagonal the box takes its own mirror image: the iteration on a Gram matrix loses its
  // null directions where that is not exactly symmetric. The warp's rows already lie in its buffer.
  __device__ __forceinline__ void WriteDiagonalBox(const struct Finish& finish, int row,
                                                   int warp_row) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = warp_row - row + lane / 8, column = lane % 8 * 8;
    uint4 lines[4], mirrored[4];
    TakeLines(take_row_, lines);
    TakeLines(take_column_, mirrored);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4& value = lines[i];
      const uint4& mirror = mirrored[i];
      const int at = first + 4 * i;
      value.x = SelectPair(value.x, mirror.x, at - column);
      value.y = SelectPair(value.y, mirror.y, at - column - 2);
      value.z = SelectPair(value.z, mirror.z, at - column - 4);
      value.w = SelectPair(value.w, mirror.w, at - column - 6);
      if (row + at < finish.rows && row + column < finish.cols) {
        __half* to = finish.d + static_cast<std::int64_t>(row + at) * finish.ldd + row + column;
        StoreGlobal(to, value);
      }
    }
  }

  // Of two neighbours in a row, those below the diagonal from `mirror`; `below` is row - column of
  // the first.
  __device__ __forceinline__ static std::uint32_t SelectPair(std::uint32_t value,
                                                             std::uint32_t mirror, int below) {
    if (below > 1) return mirror;
    return below == 1 ? __byte_perm(value, mirror, 0x3254) : value;
  }

  // Every fourth line of 16, pieces of 16 bytes: all are asked for before the first is sent.
  __device__ __forceinline__ static void TakeLines(std::uint32_t from, uint4 (&lines)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) lines[i] = LoadShared((from ^ (i % 2 * 64)) + i * 512);
  }

  // They go to `column` of rows `row`, row + 4, ...
  __device__ __forceinline__ static void SendLines(std::uint32_t from, const struct Finish& finish,
                                                   int row, int column) {
    uint4 lines[4];
    TakeLines(from, lines);
    __half* to = finish.d + static_cast<std::int64_t>(row) * finish.ldd + column;
    const int limit = column < finish.cols ? finish.rows - row : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i * 4 < limit) StoreGlobal(to, lines[i]);
      to += 4 * static_cast<std::int64_t>(finish.ldd);
    }
  }

  static constexpr int kGroupThreads = 128;

  const int barrier_;
  std::uint32_t put_row_, take_row_, put_column_, take_column_;
};

}  // namespace muond::kernels::cuda::sm90
