// The memory of one NVIDIA GPU as data paths use it. Needs no CUDA headers.
#pragma once

#include <memory>

#include "kernels/device_memory.h"

namespace muond::kernels {

// Of the device with this CUDA ordinal, which a backend of this process uses. Null and `error`
// where there is none, or in a build without CUDA. It has a stream of its own: moves run beside
// what the backend computes.
std::unique_ptr<DeviceMemory> MakeCudaDeviceMemory(int device, Error& error);

}  // namespace muond::kernels
