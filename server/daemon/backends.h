// Which backends compute: what --backend and --devices ask for against what this machine has.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/devices.h"
#include "kernels/device_memory.h"

namespace muond {

struct BackendChoice {
  std::string backend = "auto";  // auto, cuda, cpu or reference
  // Of cuda: "all", or ordinals and UUIDs ("0", "GPU-6f2c..."); a UUID may be shortened as long as
  // it names one device.
  std::vector<std::string> devices = {"all"};
  std::string cpu_products = "auto";  // auto, f32 or bf16
  kernels::BackendOptions options;
};

struct Backends {
  std::vector<std::unique_ptr<kernels::Backend>> list;  // one per device, at least one
  // Of each, its memory for data paths; null: host memory.
  std::vector<std::unique_ptr<kernels::DeviceMemory>> memories;
  std::vector<std::string> models;                      // of each: "NVIDIA H200"; host: ""
  std::string why;                                      // for the log: why these
};

// INVALID_ARGUMENT for words that are none of the above or settings that don't fit together,
// NOT_FOUND for a device that is not there, FAILED_PRECONDITION with the reason for a backend that
// this machine can't have. `auto` takes CUDA where there is a usable device, else the CPU.
absl::StatusOr<Backends> MakeBackends(const BackendChoice& choice);

// The devices of that list that `wanted` names, each once, in the list's order. Pure.
absl::StatusOr<std::vector<kernels::CudaDevice>> SelectDevices(
    const kernels::CudaDevices& found, const std::vector<std::string>& wanted);

}  // namespace muond
