// The cuda backend: Backend on one NVIDIA GPU of compute capability 8.0 or more.
//
// State lives in device memory, staging memory is pinned host memory, U and O are f16. What is
// elementwise is computed in fp64 and rounded once, as on the CPU, and is bound by memory all the
// same; Newton-Schulz runs on the tensor cores. Every call waits for its own results, so nothing is
// in flight between calls.
//
// Nothing here needs the CUDA headers, and a program that links it starts without a driver.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace muond::kernels {

// A backend on the device with this CUDA ordinal (kernels/cuda/devices.h lists them), or null and
// `error`: no driver, no such device, a capability that is too low, no memory for the workspaces.
// Of the options it uses newton_schulz_fault. It holds its own stream; several backends may share a
// device, and a process may have one per device.
std::unique_ptr<Backend> MakeCudaBackend(int device, const BackendOptions& options, Error& error);

}  // namespace muond::kernels
