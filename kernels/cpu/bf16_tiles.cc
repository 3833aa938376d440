// Loops that compilers vectorise.
//
// Nothing from the standard library is called: its inline functions would be compiled for this
// instruction set and the linker might keep that copy for the whole program.
#include "kernels/cpu/bf16_tiles.h"

#include "kernels/cpu/transpose_impl.h"

namespace muond::kernels::cpu {
namespace {

std::uint16_t NarrowBF16(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

void NarrowRow(std::uint16_t* __restrict dst, const float* __restrict src, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) dst[j] = NarrowBF16(src[j]);
}

// One row of a symmetric tile, in fp32.
void FinishRow(const SymmetricTile& t, std::int64_t i, float* __restrict values) {
  const float* __restrict sums = t.sums + i * t.cols;
  const float alpha = t.alpha;
  if (t.p == nullptr) {
    for (std::int64_t j = 0; j < t.cols; ++j) values[j] = alpha * sums[j];
    return;
  }
  const float* __restrict p = t.p + i * t.stride;
  const float* __restrict q = t.q + i * t.stride;
  const float* __restrict right = t.right;
  const float left = t.left[i];
  for (std::int64_t j = 0; j < t.cols; ++j) {
    values[j] = alpha * sums[j] + (left * q[j] + right[j] * p[j]);
  }
}

// Longer than any tile's row.
constexpr std::int64_t kLongestRow = 512;

}  // namespace

void FinishTile(const SymmetricTile& t) {
  float values[kLongestRow];
  for (std::int64_t i = 0; i < t.rows; ++i) {
    FinishRow(t, i, values);
    const std::int64_t used = t.on_diagonal ? i : t.cols;
    if (t.on_diagonal) {
      t.diagonal[i] = t.alpha * t.sums[i * t.cols + i] + (t.addend == nullptr ? 0.0f : t.addend[i]);
      t.off[i * t.stride + i] = 0;
    }
    if (t.full != nullptr) {
      __builtin_memcpy(t.full + i * t.stride, values,
                       static_cast<std::size_t>(used) * sizeof(float));
    }
    NarrowRow(t.off + i * t.stride, values, used);
  }
  if (!t.on_diagonal) {
    TransposeAny<U16x16>(t.off, t.stride, t.rows, t.cols, t.mirror, t.stride);
    return;
  }
  for (std::int64_t i = 0; i < t.rows; ++i) {
    for (std::int64_t j = 0; j < i; ++j) t.off[j * t.stride + i] = t.off[i * t.stride + j];
  }
}

void FinishTile(const RowsTile& t) {
  for (std::int64_t i = 0; i < t.rows; ++i) {
    float* __restrict sums = t.sums + i * t.cols;
    const float* __restrict x = t.x + i * t.x_stride;
    const float factor = t.factor[i];
    if (t.x_scale == 1) {
      for (std::int64_t j = 0; j < t.cols; ++j) sums[j] += factor * x[j];
    } else {
      for (std::int64_t j = 0; j < t.cols; ++j) {
        sums[j] += factor * static_cast<float>(x[j] * t.x_scale);
      }
    }
    if (!t.out_transposed) {
      __builtin_memcpy(t.out + i * t.out_stride, sums,
                       static_cast<std::size_t>(t.cols) * sizeof(float));
    }
    if (t.rounded != nullptr) NarrowRow(t.rounded + i * t.rounded_stride, sums, t.cols);
  }
  if (t.out_transposed) {
    TransposeAny<F32x16>(t.sums, t.cols, t.rows, t.cols, t.out, t.out_stride);
  }
}

void ScaleToBF16(std::uint16_t* __restrict dst, const float* __restrict src, double scale,
                 std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; ++i) {
    dst[i] = NarrowBF16(static_cast<float>(src[i] * scale));
  }
}

}  // namespace muond::kernels::cpu
