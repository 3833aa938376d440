// Random values by hashing the index, and a read loop with many loads in flight.
#include "kernels/cuda/benchmark/device_data.h"
#include "kernels/cuda/quads.cuh"

namespace muond::kernels::cuda {
namespace {

__device__ std::uint64_t Mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__global__ void FillKernel(void* data, Dtype dtype, std::size_t elements, float sigma,
                           std::uint64_t seed) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < elements; i += stride) {
    const std::uint64_t bits = Mix(Mix(seed) ^ i);
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
    StoreElement(data, dtype, i, sigma * sqrtf(-2 * logf(u)) * cospif(2 * v));  // Box-Muller
  }
}

__global__ void __launch_bounds__(256)
    ReadKernel(const uint4* data, std::size_t units, std::uint32_t* sink) {
  constexpr int kUnroll = 8;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * 256;
  std::size_t i = static_cast<std::size_t>(blockIdx.x) * 256 + threadIdx.x;
  std::uint32_t folded = 0;
  for (; i + (kUnroll - 1) * stride < units; i += kUnroll * stride) {
    uint4 held[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) held[k] = __ldcs(data + i + k * stride);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) folded ^= held[k].x ^ held[k].y ^ held[k].z ^ held[k].w;
  }
  for (; i < units; i += stride) folded ^= data[i].x;
  if (folded == 0x12345678u) *sink = folded;
}

}  // namespace

cudaError_t FillGaussian(void* data, Dtype dtype, std::size_t elements, float sigma,
                         std::uint64_t seed) {
  if (elements == 0) return cudaSuccess;
  FillKernel<<<4096, 256>>>(data, dtype, elements, sigma, seed);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

cudaError_t ReadAll(const void* data, std::size_t bytes, std::uint32_t* sink, cudaStream_t stream) {
  ReadKernel<<<132 * 16, 256, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, sink);
  return cudaGetLastError();
}

}  // namespace muond::kernels::cuda
