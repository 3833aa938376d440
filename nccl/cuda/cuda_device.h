// GPUs by way of the CUDA runtime, which is linked statically and looks for the driver itself: a
// program with it starts on a machine that has none.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "nccl/device.h"

namespace muond::nccl {

// The GPU with this UUID ("GPU-..."). FAILED_PRECONDITION where there is no driver or this build
// has no CUDA code, NOT_FOUND where this process sees no such GPU. Any thread.
absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(const std::string& uuid);

}  // namespace muond::nccl
