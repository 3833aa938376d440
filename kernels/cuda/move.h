// Moves on the device: copy and sum in one pass (kernels/device_memory.h has the sum).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/elementwise.h"

namespace muond::kernels::cuda {

struct MovePassJob {
  void* dst;  // null: only summed
  const void* src;
  std::size_t elements;
  std::uint64_t first;  // the first element's i
  std::uint32_t element_bytes;
  std::uint32_t sum;
  bool aligned;  // both addresses: quads of elements can be read and written at once
};

// sums[job.sum] += what each job's elements add, in device memory. Chunks of kChunkElements.
// Returns the error of the launch.
cudaError_t MoveAll(const JobTable<MovePassJob>& table, unsigned long long* sums,
                    cudaStream_t stream);

}  // namespace muond::kernels::cuda
