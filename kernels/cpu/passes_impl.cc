// The elementwise passes, compiled once per instruction set (MUOND_PASSES_TABLE, MUOND_PASSES_ISA).
//
// A block goes through in tiles that stay in the first-level cache: gradient to fp32, the formula,
// the statistics. Each tile loop is one that compilers vectorise, and memory is read and written
// once. Nothing from the standard library is called: its inline functions would be compiled for
// this instruction set and the linker might keep that copy for the whole program.
#include "kernels/cpu/passes.h"

#include "kernels/cpu/observer_impl.h"
#include "kernels/cpu/transpose_impl.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace muond::kernels::cpu {
namespace {

constexpr std::size_t kTile = 512;
// What is only read needs no tile; the end of a longer piece costs less.
constexpr std::size_t kStream = 8192;
static_assert(kTile % kLanes == 0 && kStream % kTile == 0,
              "a tile must not move an element to another lane");

typedef float UnalignedFloat __attribute__((aligned(1), may_alias));

std::size_t Min(std::size_t a, std::size_t b) { return a < b ? a : b; }

// The branch-free forms of tensor.cc's conversions.
float WidenF16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
  const std::uint32_t magnitude = half & 0x7fff;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const std::uint32_t quiet = magnitude > 0x7c00 ? 0x400000u : 0u;
  const std::uint32_t special = (0x7f800000u + ((magnitude & 0x3ff) << 13)) | quiet;
  const std::uint32_t small = __builtin_bit_cast(
      std::uint32_t, static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t finite = magnitude < 0x400 ? small : normal;
  return __builtin_bit_cast(float, sign | (magnitude < 0x7c00 ? finite : special));
}

std::uint16_t NarrowF16(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t small =
      __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const std::uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const std::uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
  return static_cast<std::uint16_t>(sign | (magnitude < 0x47800000u ? finite : special));
}

std::uint16_t NarrowBF16(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

void WidenF16s(float* __restrict dst, const UnalignedHalf* __restrict src, std::size_t n) {
  std::size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(halves));
  }
#endif
  for (; i < n; ++i) dst[i] = WidenF16(src[i]);
}

void NarrowF16s(UnalignedHalf* __restrict dst, const float* __restrict src, std::size_t n) {
  std::size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m256 values = _mm256_loadu_ps(src + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#endif
  for (; i < n; ++i) dst[i] = NarrowF16(src[i]);
}

// Elements [offset, offset + n) of `data` as fp32, times `unscale`.
//
// Always times: by 1 it changes nothing, and a loop that only copies would be compiled into a
// `rep movs`, which costs more than all the rest of a tile. For the same reason 16-bit data are
// not copied into a local array first.
void LoadTile(float* __restrict tile, const void* data, Dtype dtype, std::size_t offset,
              std::size_t n, float unscale) {
  if (dtype == Dtype::kF32) {
    const UnalignedFloat* __restrict source = static_cast<const UnalignedFloat*>(data) + offset;
    for (std::size_t i = 0; i < n; ++i) tile[i] = source[i] * unscale;
    return;
  }
  const UnalignedHalf* __restrict halves = static_cast<const UnalignedHalf*>(data) + offset;
  if (dtype == Dtype::kBF16) {
    for (std::size_t i = 0; i < n; ++i) {
      tile[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(halves[i]) << 16) * unscale;
    }
    return;
  }
  WidenF16s(tile, halves, n);
  if (unscale == 1.0f) return;
  for (std::size_t i = 0; i < n; ++i) tile[i] *= unscale;
}

void LoadGradient(float* __restrict tile, const GradientBlock& gradient, std::size_t offset,
                  std::size_t n) {
  LoadTile(tile, gradient.data, gradient.dtype, offset, n, gradient.unscale);
}

void Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements, bool first) {
  float tile[kTile];
  for (std::size_t begin = 0; begin < elements; begin += kTile) {
    const std::size_t n = Min(kTile, elements - begin);
    float* __restrict out = acc + begin;
    if (first) {
      LoadTile(out, data, dtype, begin, n, 1.0f);
      continue;
    }
    LoadTile(tile, data, dtype, begin, n, 1.0f);
    for (std::size_t i = 0; i < n; ++i) out[i] += tile[i];
  }
}

void ScanTiles(const GradientBlock& gradient, std::size_t begin, std::size_t end,
               Observer& observer) {
  float tile[kTile];
  for (; begin < end; begin += kTile) {
    const std::size_t n = Min(kTile, end - begin);
    LoadGradient(tile, gradient, begin, n);
    observer.Observe(tile, n);
  }
}

void Scan(const GradientBlock& gradient, BlockStats* stats) {
  Observer observer;
  for (std::size_t begin = 0; begin < gradient.elements; begin += kStream) {
    const std::size_t n = Min(kStream, gradient.elements - begin);
    if (gradient.dtype == Dtype::kF32) {
      observer.ObserveStream(static_cast<const float*>(gradient.data) + begin, n, gradient.unscale);
      continue;
    }
#if defined(__AVX512BW__)
    if (gradient.dtype == Dtype::kBF16 &&
        observer.ObserveBF16(static_cast<const UnalignedHalf*>(gradient.data) + begin, n,
                             gradient.unscale)) {
      continue;
    }
#endif
    ScanTiles(gradient, begin, begin + n, observer);
  }
  observer.Finish(stats);
}

void Round(void* dst, Dtype dtype, const float* src, std::size_t elements) {
  if (dtype == Dtype::kF32) {
    __builtin_memcpy(dst, src, elements * sizeof(float));
    return;
  }
  UnalignedHalf* __restrict halves = static_cast<UnalignedHalf*>(dst);
  if (dtype == Dtype::kF16) {
    NarrowF16s(halves, src, elements);
    return;
  }
  const float* __restrict source = src;
  for (std::size_t i = 0; i < elements; ++i) halves[i] = NarrowBF16(source[i]);
}

template <bool kEma, bool kNesterov, Dtype kM>
void MomentumTile(const float* __restrict g, const float* __restrict m, float* __restrict new_m,
                  float* __restrict u, std::size_t n, double scale,
                  const MomentumWeights& weights) {
  const double beta = weights.beta;
  const double rest = 1 - beta;
  // Factors of a power of two change no rounding, wherever they stand.
  const double u_gradient = (kEma ? rest : 1.0) * weights.u_scale;
  const double u_momentum = (kNesterov ? beta : 1.0) * weights.u_scale;
  for (std::size_t i = 0; i < n; ++i) {
    const double gi = g[i] * scale;
    const double mi = m[i];
    float next = static_cast<float>(kEma ? mi + rest * (gi - mi) : beta * mi + gi);
    if (kM == Dtype::kBF16) {
      next = __builtin_bit_cast(float, static_cast<std::uint32_t>(NarrowBF16(next)) << 16);
    }
    new_m[i] = next;
    u[i] = static_cast<float>(kNesterov ? u_gradient * gi + u_momentum * next : u_momentum * next);
  }
}

template <Dtype kM>
void MomentumOf(const GradientBlock& gradient, const MomentumWeights& weights, void* m,
                bool write_m, float* u, BlockStats* stats) {
  float g[kTile];
  float wide_m[kTile];
  float new_m[kTile];
  Observer observer;
  const auto tile_pass =
      weights.ema
          ? (weights.nesterov ? MomentumTile<true, true, kM> : MomentumTile<true, false, kM>)
          : (weights.nesterov ? MomentumTile<false, true, kM> : MomentumTile<false, false, kM>);
  for (std::size_t begin = 0; begin < gradient.elements; begin += kTile) {
    const std::size_t n = Min(kTile, gradient.elements - begin);
    char* at = static_cast<char*>(m) + begin * (kM == Dtype::kF32 ? sizeof(float) : 2);
    LoadGradient(g, gradient, begin, n);
    const float* old_m = reinterpret_cast<const float*>(at);
    if (kM != Dtype::kF32) {
      LoadTile(wide_m, at, kM, 0, n, 1.0f);
      old_m = wide_m;
    }
    tile_pass(g, old_m, new_m, u + begin, n, gradient.scale, weights);
    if (!write_m) continue;
    Round(at, kM, new_m, n);
    observer.Observe(new_m, n);
  }
  if (write_m) observer.Finish(stats);
}

void Momentum(const GradientBlock& gradient, const MomentumWeights& weights, void* m, bool write_m,
              float* u, BlockStats* stats) {
  const auto pass =
      weights.m_dtype == Dtype::kF32 ? MomentumOf<Dtype::kF32> : MomentumOf<Dtype::kBF16>;
  pass(gradient, weights, m, write_m, u, stats);
}

// The new weights of one tile, from the first-level cache.
void RoundTile(const RoundedBlock& rounded, const float* w, std::size_t begin, std::size_t n) {
  if (rounded.data == nullptr) return;
  const std::size_t bytes = rounded.dtype == Dtype::kF32 ? 4 : 2;
  Round(static_cast<char*>(rounded.data) + begin * bytes, rounded.dtype, w, n);
}

void Apply(float* w, const float* o, std::size_t elements, double decay, double step,
           RoundedBlock rounded, BlockStats* stats) {
  Observer observer;
  for (std::size_t begin = 0; begin < elements; begin += kTile) {
    const std::size_t n = Min(kTile, elements - begin);
    float* __restrict wt = w + begin;
    const float* __restrict ot = o + begin;
    for (std::size_t i = 0; i < n; ++i) {
      wt[i] = static_cast<float>(decay * wt[i] - step * ot[i]);
    }
    observer.Observe(wt, n);
    RoundTile(rounded, wt, begin, n);
  }
  observer.Finish(stats);
}

void AdamWTile(const float* __restrict g, double scale, const AdamWWeights& weights,
               float* __restrict w, float* __restrict m, float* __restrict v, std::size_t n) {
  const AdamWWeights k = weights;
  const double rest1 = 1 - k.beta1;
  const double rest2 = 1 - k.beta2;
  for (std::size_t i = 0; i < n; ++i) {
    const double gi = g[i] * scale;
    const float mi = static_cast<float>(k.beta1 * m[i] + rest1 * gi);
    const float vi = static_cast<float>(k.beta2 * v[i] + (rest2 * gi) * gi);
    // Every processor rounds an fp32 root correctly, at a quarter of the cost of one in fp64.
    const double denominator = static_cast<double>(__builtin_sqrtf(vi)) * k.v_factor + k.eps;
    w[i] = static_cast<float>(k.decay * w[i] - k.step * mi / denominator);
    m[i] = mi;
    v[i] = vi;
  }
}

void AdamW(const GradientBlock& gradient, const AdamWWeights& weights, float* w, float* m, float* v,
           RoundedBlock rounded, BlockStats* stats) {
  float g[kTile];
  Observer w_observer, m_observer, v_observer;
  for (std::size_t begin = 0; begin < gradient.elements; begin += kTile) {
    const std::size_t n = Min(kTile, gradient.elements - begin);
    LoadGradient(g, gradient, begin, n);
    AdamWTile(g, gradient.scale, weights, w + begin, m + begin, v + begin, n);
    w_observer.Observe(w + begin, n);
    m_observer.Observe(m + begin, n);
    v_observer.Observe(v + begin, n);
    RoundTile(rounded, w + begin, begin, n);
  }
  w_observer.Finish(&stats[0]);
  m_observer.Finish(&stats[1]);
  v_observer.Finish(&stats[2]);
}

void Scale(float* dst, const float* src, double factor, std::size_t elements) {
  for (std::size_t i = 0; i < elements; ++i) dst[i] = static_cast<float>(src[i] * factor);
}

// Rows of one register.
#if defined(__AVX512F__)
using TransposeRow = F32x16;
#elif defined(__AVX2__)
using TransposeRow = F32x8;
#else
using TransposeRow = F32x4;
#endif

void Transpose(const float* src, std::int64_t src_stride, std::int64_t rows, std::int64_t cols,
               float* dst, std::int64_t dst_stride) {
  TransposeAny<TransposeRow>(src, src_stride, rows, cols, dst, dst_stride);
}

}  // namespace

extern const Passes MUOND_PASSES_TABLE;
const Passes MUOND_PASSES_TABLE = {
    MUOND_PASSES_ISA, Accumulate, Scan, Round, Momentum, Apply, AdamW, Scale, Transpose,
};

}  // namespace muond::kernels::cpu
