// A build without CUDA has no GPU to exchange with.
#include "absl/strings/str_format.h"
#include "nccl/cuda/cuda_device.h"

namespace muond::nccl {

absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(const std::string& uuid) {
  return absl::FailedPreconditionError(
      absl::StrFormat("GPU \"%s\": this build has no CUDA code", uuid));
}

}  // namespace muond::nccl
