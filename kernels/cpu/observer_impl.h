// The statistics of a block, for sources that are compiled for one instruction set.
//
// Element i of a block goes to lane i mod kLanes, whatever the instruction set, so all of them give
// the same bits. Internal linkage, as in transpose_impl.h.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/passes.h"

namespace muond::kernels::cpu {
namespace {  // NOLINT(google-build-namespaces)

// Four registers of sums: with fewer, each addition waits for the one before.
inline constexpr std::size_t kLanes = 32;

inline constexpr std::int32_t kInfinityBits = 0x7f800000;

// Trainers' buffers may begin at any byte.
typedef std::uint16_t UnalignedHalf __attribute__((aligned(1), may_alias));

// Fed tile by tile; all tiles but a block's last have a multiple of kLanes elements.
class Observer {
 public:
  // Elements in the first-level cache.
  void Observe(const float* x, std::size_t n) { ObserveAll<false>(x, n, 1.0f); }

  // Elements that come from memory, in any alignment, x[i] * factor each: a product in fp32.
  void ObserveStream(const float* x, std::size_t n, float factor) {
    ObserveAll<true>(x, n, factor);
  }

#if defined(__AVX512BW__)
  // ObserveStream of float(x[i]) without the detour through a tile, which would cost more time
  // than the bytes take to come in. False, and nothing is counted, for values that are not finite
  // and where n is no multiple of kLanes.
  bool ObserveBF16(const UnalignedHalf* x, std::size_t n, float factor) {
    if (n % kLanes != 0) return false;
    const __m512 factors = _mm512_set1_ps(factor);
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i max_bits = _mm512_setzero_si512();
    Sums sums = sums_;
    const auto add = [&](std::size_t lanes, __m256i halves) {
      const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
      const __m512 values = _mm512_mul_ps(_mm512_castsi512_ps(bits), factors);
      AddSquares(sums.lanes[lanes], _mm512_castps512_ps256(values));
      AddSquares(sums.lanes[lanes + 1], _mm512_extractf32x8_ps(values, 1));
    };
    for (std::size_t i = 0; i < n; i += kLanes) {
      PrefetchAfter(x + i);
      const __m512i halves = _mm512_loadu_si512(x + i);
      max_bits = _mm512_max_epu16(max_bits, _mm512_and_si512(halves, magnitude));
      add(0, _mm512_castsi512_si256(halves));
      add(2, _mm512_extracti64x4_epi64(halves, 1));
    }
    // Rounding keeps order, so the largest product is that of the largest |x|.
    std::uint16_t all[kLanes];
    __builtin_memcpy(all, &max_bits, sizeof(all));
    std::uint32_t max = 0;
    for (const std::uint16_t bits : all) max = bits > max ? bits : max;
    const float product = __builtin_bit_cast(float, max << 16) * factor;
    const std::int32_t product_bits = __builtin_bit_cast(std::int32_t, product) & 0x7fffffff;
    if (product_bits >= kInfinityBits) return false;
    max_bits_ = product_bits > max_bits_ ? product_bits : max_bits_;
    sums_ = sums;
    return true;
  }
#endif

  void Finish(BlockStats* stats) const {
    double sums[kLanes];
    __builtin_memcpy(sums, &sums_, sizeof(sums));
    for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
      for (std::size_t l = 0; l < width; ++l) sums[l] += sums[l + width];
    }
    stats->nonfinite = nonfinite_;
    stats->max_abs = static_cast<double>(__builtin_bit_cast(float, max_bits_));
    stats->sum_squares = sums[0];
  }

 private:
  typedef std::int32_t Bits __attribute__((vector_size(64)));
  typedef double Lanes __attribute__((vector_size(64)));
  typedef float Sixteen __attribute__((vector_size(64)));
  typedef float Eight __attribute__((vector_size(32)));
  struct Sums {
    Lanes lanes[4];
  };
  static_assert(sizeof(Sums) == kLanes * sizeof(double));

  template <bool kStream>
  void ObserveAll(const float* x, std::size_t n, float factor) {
    // Bits of |x| order like |x| itself, and those of what is not finite stand above all others.
    Bits max_bits = {};
    Sums sums = sums_;
    const std::size_t whole = n / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) {
      if constexpr (kStream) {
        PrefetchAfter(x + i);
        PrefetchAfter(x + i + kLanes / 2);
      }
      AddRow<kStream>(x + i, factor, sums, max_bits);
    }
    if (whole < n) {
      float row[kLanes] = {};
      __builtin_memcpy(row, x + whole, (n - whole) * sizeof(float));
      AddRow<kStream>(row, factor, sums, max_bits);
    }
    std::int32_t max = max_bits_;
    for (std::size_t l = 0; l < 16; ++l) max = max_bits[l] > max ? max_bits[l] : max;
    if (max >= kInfinityBits) {
      ObserveFinite(x, n, factor);  // from the statistics as they were
      return;
    }
    max_bits_ = max;
    sums_ = sums;
  }

  // A page ahead, where the processor's own prefetching stops: reading alone gains 10 %.
  static void PrefetchAfter(const void* x) {
    __builtin_prefetch(static_cast<const char*>(x) + 4096);
  }

  template <bool kScaled>
  static void AddRow(const float* x, float factor, Sums& sums, Bits& max_bits) {
    for (std::size_t half = 0; half < 2; ++half) {
      Sixteen values;
      Bits bits;
      Eight eights[2];
      __builtin_memcpy(&values, x + 16 * half, sizeof(values));
      if constexpr (kScaled) values *= factor;
      __builtin_memcpy(&bits, &values, sizeof(bits));
      __builtin_memcpy(eights, &values, sizeof(eights));
      bits &= 0x7fffffff;
      max_bits = bits > max_bits ? bits : max_bits;
      AddSquares(sums.lanes[2 * half], eights[0]);
      AddSquares(sums.lanes[2 * half + 1], eights[1]);
    }
  }

  // The square of an fp32 number is exact in fp64, so a fused multiply-add rounds the same.
  static void AddSquares(Lanes& sums, const Eight& x) {
#if defined(__AVX512F__)
    const __m512d values = _mm512_cvtps_pd(x);
    sums = _mm512_fmadd_pd(values, values, sums);
#else
    const Lanes values = __builtin_convertvector(x, Lanes);
    sums += values * values;
#endif
  }

  void ObserveFinite(const float* x, std::size_t n, float factor) {
    for (std::size_t i = 0; i < n; ++i) {
      float element;
      __builtin_memcpy(&element, x + i, sizeof(element));
      element *= factor;
      const std::int32_t bits = __builtin_bit_cast(std::int32_t, element) & 0x7fffffff;
      if (bits >= kInfinityBits) {
        ++nonfinite_;
        continue;
      }
      max_bits_ = bits > max_bits_ ? bits : max_bits_;
      const double value = element;
      sums_.lanes[i % kLanes / 8][i % 8] += value * value;
    }
  }

  std::uint64_t nonfinite_ = 0;
  std::int32_t max_bits_ = 0;
  Sums sums_ = {};
};

}  // namespace
}  // namespace muond::kernels::cpu
