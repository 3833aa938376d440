// A backend whose memory the host can't touch, without a device: what must work on a GPU is tested
// with it anywhere.
//
// Its pointers lie where no memory is mapped: dereferencing one outside of a call ends the process.
// Each argument is checked to be memory of the kind that kernels/backend.h asks for. What is
// computed is computed by another backend.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "kernels/backend.h"
#include "kernels/device_memory.h"

namespace muond::testing {

struct DeviceLikeOptions {
  // With kF32 every result has the bits of the backend behind; with kF16 U and O are rounded.
  kernels::Dtype iterate = kernels::Dtype::kF32;
  std::size_t memory_bytes = std::size_t{1} << 40;  // that Allocate can give in all
  // Newton-Schulz fails for rules of which this says so, as a device without scratch left does.
  std::function<bool(const kernels::NewtonSchulzRule&)> refuses;
};

// The memory of such a device, for data paths: blocks are its own kind of memory here, and plain
// memory to whoever opens their handles (kernels::OpenHostBlock).
std::unique_ptr<kernels::DeviceMemory> MakeDeviceLikeMemory(std::string uuid);

std::unique_ptr<kernels::Backend> MakeDeviceLikeBackend(std::unique_ptr<kernels::Backend> behind,
                                                        const DeviceLikeOptions& options = {});

}  // namespace muond::testing
