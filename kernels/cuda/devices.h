// Which NVIDIA GPUs this process can use, and why there are none where there are none.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace muond::kernels {

struct CudaDevice {
  int ordinal = 0;   // what MakeCudaBackend takes; follows CUDA_VISIBLE_DEVICES
  std::string name;  // "NVIDIA H200"
  std::string uuid;  // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", as nvidia-smi -L prints
  std::size_t memory_bytes = 0;
  int capability_major = 0;
  int capability_minor = 0;
  bool usable = false;  // whether this build holds code for that capability
};

struct CudaDevices {
  std::vector<CudaDevice> devices;  // in the order of their ordinals
  std::string why_none;             // why `devices` is empty: no driver, a driver that is too old,
                                    // no GPU; empty where there are devices
};

// Never fails: a machine without a driver has an empty list and a reason. Any thread.
CudaDevices ListCudaDevices();

}  // namespace muond::kernels
