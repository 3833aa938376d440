// Data and yardsticks that live on the device: random values, and the plainest read of memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace muond::kernels::cuda {

// Fills `data` with Gaussian values of standard deviation `sigma`, the same ones for the same seed.
// Waits.
cudaError_t FillGaussian(void* data, Dtype dtype, std::size_t elements, float sigma,
                         std::uint64_t seed);

// Reads `bytes` (a multiple of 16) and writes next to nothing: the ceiling of read-only passes.
cudaError_t ReadAll(const void* data, std::size_t bytes, std::uint32_t* sink, cudaStream_t stream);

}  // namespace muond::kernels::cuda
