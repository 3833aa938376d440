// Sums on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nccl/sum.h"

namespace muond::nccl {

// sums[i] += the sum of jobs[i], for count jobs; both arrays are on the device. `largest`: elements
// of the largest job.
cudaError_t LaunchSum(const SumJob* jobs, std::uint64_t* sums, int count, std::uint64_t largest,
                      cudaStream_t stream);

}  // namespace muond::nccl
