// Conversions of single tensors between fp32 and what trainers and Newton-Schulz use; batched copy.
#include <algorithm>

#include "kernels/cuda/iterate_dtype.h"
#include "kernels/cuda/parts.cuh"

namespace muond::kernels::cuda {
namespace {

// Enough thread blocks to fill any device; each walks through the tensor in strides.
constexpr std::size_t kMostBlocks = 4096;

std::size_t BlocksFor(std::size_t elements) {
  const std::size_t quads = (elements + 3) / 4;
  return std::min((quads + kThreads - 1) / kThreads, kMostBlocks);
}

template <Dtype kDtype>
struct Source {
  const void* data;
  __device__ Quad At(std::size_t q) const {
    return LoadQuad<kDtype>(static_cast<const char*>(data) + q * (kDtype == Dtype::kF32 ? 16 : 8),
                            0);
  }
  __device__ float Element(std::size_t i) const { return LoadElement(data, kDtype, i); }
};

struct Destination {
  void* data;
  Dtype dtype;
  __device__ void Put(std::size_t q, const Quad& quad) const {
    StoreQuad(static_cast<char*>(data) + q * (dtype == Dtype::kF32 ? 16 : 8), dtype, 0, quad);
  }
};

struct Nothing {
  __device__ float operator()(float value, float) const { return value; }
};
struct Scaled {
  double scale;
  __device__ float operator()(float value, float) const {
    return static_cast<float>(static_cast<double>(value) * scale);
  }
};
struct Added {
  __device__ float operator()(float value, float old) const { return old + value; }
};

// dst[i] = rule(src[i], dst[i]); the old value is read, and dst is fp32, only where kReadsOld.
template <Dtype kFrom, bool kReadsOld, typename Rule>
__global__ void __launch_bounds__(kThreads)
    ConvertKernel(Destination to, Source<kFrom> from, std::size_t elements, bool aligned,
                  Rule rule) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * kThreads;
  const std::size_t quads = elements / 4;
  std::size_t q = static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (aligned) {
    for (; q < quads; q += stride) {
      Quad quad = from.At(q);
      Quad old{};
      if (kReadsOld) old = Source<Dtype::kF32>{to.data}.At(q);
      for (int i = 0; i < 4; ++i) quad.x[i] = rule(quad.x[i], old.x[i]);
      to.Put(q, quad);
    }
  }
  for (; 4 * q < elements; q += stride) {
    for (std::size_t e = 4 * q; e < min(4 * q + 4, elements); ++e) {
      const float old = kReadsOld ? static_cast<const float*>(to.data)[e] : 0.0f;
      StoreElement(to.data, to.dtype, e, rule(from.Element(e), old));
    }
  }
}

template <Dtype kFrom, bool kReadsOld, typename Rule>
cudaError_t Launch(Destination to, const void* from, std::size_t elements, Rule rule,
                   cudaStream_t stream) {
  if (elements == 0) return cudaSuccess;
  const bool aligned = QuadAligned(to.data, to.dtype) && QuadAligned(from, kFrom);
  const auto blocks = static_cast<unsigned>(BlocksFor(elements));
  ConvertKernel<kFrom, kReadsOld>
      <<<blocks, kThreads, 0, stream>>>(to, Source<kFrom>{from}, elements, aligned, rule);
  return cudaGetLastError();
}

template <Dtype kFrom>
cudaError_t AddFrom(Destination to, const void* data, std::size_t elements, bool first,
                    cudaStream_t stream) {
  return first ? Launch<kFrom, false>(to, data, elements, Nothing{}, stream)
               : Launch<kFrom, true>(to, data, elements, Added{}, stream);
}

template <typename Unit>
__device__ void CopyUnits(const Part& part, char* dst, const char* src) {
  const auto units = static_cast<std::uint32_t>(part.elements / sizeof(Unit));
  auto* to = reinterpret_cast<Unit*>(dst);
  const auto* from = reinterpret_cast<const Unit*>(src);
  constexpr std::uint32_t kUnroll = 4;
  std::uint32_t i = part.first;
  for (; i + (kUnroll - 1) * part.stride < units; i += kUnroll * part.stride) {
    Unit held[kUnroll];
#pragma unroll
    for (std::uint32_t k = 0; k < kUnroll; ++k) held[k] = from[i + k * part.stride];
#pragma unroll
    for (std::uint32_t k = 0; k < kUnroll; ++k) to[i + k * part.stride] = held[k];
  }
  for (; i < units; i += part.stride) to[i] = from[i];
  for (std::uint32_t b = units * sizeof(Unit) + part.first; b < part.elements; b += part.stride) {
    dst[b] = src[b];
  }
}

__global__ void __launch_bounds__(kThreads) CopyKernel(JobTable<CopyPassJob> table) {
  const std::uint32_t index = FindJob(table);
  const CopyPassJob job = table.jobs[index];
  const Part part = PartOf<kCopyChunkBytes, kStripedChunks>(table.first_chunk, index, job.bytes);
  char* dst = static_cast<char*>(job.dst) + part.begin;
  const char* src = static_cast<const char*>(job.src) + part.begin;
  if (job.unit == 16) return CopyUnits<uint4>(part, dst, src);
  if (job.unit == 8) return CopyUnits<uint2>(part, dst, src);
  if (job.unit == 4) return CopyUnits<std::uint32_t>(part, dst, src);
  if (job.unit == 2) return CopyUnits<std::uint16_t>(part, dst, src);
  CopyUnits<unsigned char>(part, dst, src);
}

}  // namespace

cudaError_t AddTo(float* acc, const void* data, Dtype dtype, std::size_t elements, bool first,
                  cudaStream_t stream) {
  const Destination to{acc, Dtype::kF32};
  if (dtype == Dtype::kF32) return AddFrom<Dtype::kF32>(to, data, elements, first, stream);
  if (dtype == Dtype::kBF16) return AddFrom<Dtype::kBF16>(to, data, elements, first, stream);
  return AddFrom<Dtype::kF16>(to, data, elements, first, stream);
}

cudaError_t RoundTo(void* dst, Dtype dtype, const float* src, std::size_t elements,
                    cudaStream_t stream) {
  return Launch<Dtype::kF32, false>({dst, dtype}, src, elements, Nothing{}, stream);
}

cudaError_t ToIterate(void* iterate, const float* src, std::size_t elements, double scale,
                      cudaStream_t stream) {
  return Launch<Dtype::kF32, false>({iterate, kIterateDtype}, src, elements, Scaled{scale}, stream);
}

cudaError_t FromIterate(float* dst, const void* iterate, std::size_t elements,
                        cudaStream_t stream) {
  return Launch<kIterateDtype, false>({dst, Dtype::kF32}, iterate, elements, Nothing{}, stream);
}

cudaError_t CopyAll(const JobTable<CopyPassJob>& table, cudaStream_t stream) {
  CopyKernel<<<table.chunks, kThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda
