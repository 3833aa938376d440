// Faults that a device doesn't recover from within a process.
#pragma once

#include <cuda_runtime_api.h>

namespace muond::kernels::cuda {

// Whether the current device is lost to this process: its context gives one error for ever
// (CUDA's "sticky" ones: an illegal address, an illegal instruction, memory that can't be
// corrected). Errors of a single call, such as memory that is not there, are none.
bool DeviceLost();

// Fault injection: a kernel that traps, and the error that it leaves behind.
cudaError_t Trap(cudaStream_t stream);

}  // namespace muond::kernels::cuda
