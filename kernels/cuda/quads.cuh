// How the elementwise passes read and write memory: four elements at a time, whatever their type,
// so that an element meets the same thread in a tensor of any type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace muond::kernels::cuda {

// Threads of a block in every pass: part of the order of sums.
inline constexpr std::uint32_t kThreads = 256;

// Four elements as they lie in memory.
template <Dtype kDtype>
struct RawQuad {
  uint2 bits;
};
template <>
struct RawQuad<Dtype::kF32> {
  float4 bits;
};

struct Quad {
  float x[4];
};

// Quad `q` of aligned data. Hints that the bytes are not needed again cost up to 4 % here.
template <Dtype kDtype>
__device__ inline RawQuad<kDtype> LoadRaw(const void* data, std::uint32_t q) {
  if constexpr (kDtype == Dtype::kF32) {
    return {*(static_cast<const float4*>(data) + q)};
  } else {
    return {*(static_cast<const uint2*>(data) + q)};
  }
}

__device__ inline float2 Widen(std::uint32_t pair, Dtype dtype) {
  if (dtype == Dtype::kBF16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <Dtype kDtype>
__device__ inline Quad Unpack(const RawQuad<kDtype>& raw) {
  if constexpr (kDtype == Dtype::kF32) {
    return {{raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w}};
  } else {
    const float2 low = Widen(raw.bits.x, kDtype);
    const float2 high = Widen(raw.bits.y, kDtype);
    return {{low.x, low.y, high.x, high.y}};
  }
}

template <Dtype kDtype>
__device__ inline Quad LoadQuad(const void* data, std::uint32_t q) {
  return Unpack(LoadRaw<kDtype>(data, q));
}

// The processor's conversions make every NaN the same; tensor.h's keep sign and payload.
__device__ inline std::uint32_t NarrowNan(float value, std::uint32_t otherwise, Dtype dtype) {
  const std::uint32_t bits = __float_as_uint(value);
  if (!isnan(value)) return otherwise & 0xffffu;
  if (dtype == Dtype::kBF16) return bits >> 16 | 0x40u;
  return (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
}

// Two values in 16 bits each, to nearest even; `low` comes first in memory. NaN stays NaN.
__device__ inline std::uint32_t NarrowFast(float low, float high, Dtype dtype) {
  if (dtype == Dtype::kBF16) {
    const __nv_bfloat162 narrow = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&narrow);
  }
  const __half2 narrow = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&narrow);
}

// The same, to the bit of kernels/tensor.h for NaN as well.
__device__ inline std::uint32_t Narrow(float low, float high, Dtype dtype) {
  const std::uint32_t pair = NarrowFast(low, high, dtype);
  if (!isnan(low) && !isnan(high)) return pair;
  return NarrowNan(low, pair, dtype) | NarrowNan(high, pair >> 16, dtype) << 16;
}

__device__ inline void StoreQuad(void* data, Dtype dtype, std::uint32_t q, const Quad& quad) {
  if (dtype == Dtype::kF32) {
    static_cast<float4*>(data)[q] = make_float4(quad.x[0], quad.x[1], quad.x[2], quad.x[3]);
    return;
  }
  static_cast<uint2*>(data)[q] =
      make_uint2(Narrow(quad.x[0], quad.x[1], dtype), Narrow(quad.x[2], quad.x[3], dtype));
}

// Of iterates, which nobody looks at when they are not finite.
template <Dtype kDtype>
__device__ inline void StoreIterateQuad(void* data, std::uint32_t q, const Quad& quad) {
  static_cast<uint2*>(data)[q] = make_uint2(NarrowFast(quad.x[0], quad.x[1], kDtype),
                                            NarrowFast(quad.x[2], quad.x[3], kDtype));
}

// Element i of data at any address, for the ends and for what is not aligned.
__device__ inline float LoadElement(const void* data, Dtype dtype, std::size_t i) {
  const std::size_t size = dtype == Dtype::kF32 ? 4 : 2;
  const auto* bytes = static_cast<const unsigned char*>(data) + i * size;
  if (dtype == Dtype::kF32) {
    if (reinterpret_cast<std::uintptr_t>(bytes) % 4 == 0) {
      return *reinterpret_cast<const float*>(bytes);
    }
    return __uint_as_float(bytes[0] | bytes[1] << 8 | bytes[2] << 16 |
                           static_cast<std::uint32_t>(bytes[3]) << 24);
  }
  const std::uint32_t bits = reinterpret_cast<std::uintptr_t>(bytes) % 2 == 0
                                 ? *reinterpret_cast<const std::uint16_t*>(bytes)
                                 : bytes[0] | static_cast<std::uint32_t>(bytes[1]) << 8;
  return Widen(bits, dtype).x;
}

__device__ inline void StoreElement(void* data, Dtype dtype, std::size_t i, float value) {
  const std::size_t size = dtype == Dtype::kF32 ? 4 : 2;
  auto* bytes = static_cast<unsigned char*>(data) + i * size;
  const std::uint32_t bits =
      dtype == Dtype::kF32 ? __float_as_uint(value) : Narrow(value, 0.0f, dtype);
  if (reinterpret_cast<std::uintptr_t>(bytes) % size != 0) {
    for (std::size_t b = 0; b < size; ++b) bytes[b] = static_cast<unsigned char>(bits >> (8 * b));
  } else if (dtype == Dtype::kF32) {
    *reinterpret_cast<std::uint32_t*>(bytes) = bits;
  } else {
    *reinterpret_cast<std::uint16_t*>(bytes) = static_cast<std::uint16_t>(bits);
  }
}

}  // namespace muond::kernels::cuda
