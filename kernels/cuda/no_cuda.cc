// What a build without CUDA answers: there are no devices, and why.
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/devices.h"

namespace muond::kernels {
namespace {

constexpr char kWhy[] = "this build has no CUDA code";

}  // namespace

CudaDevices ListCudaDevices() { return {.devices = {}, .why_none = kWhy}; }

std::unique_ptr<Backend> MakeCudaBackend(int, const BackendOptions&, Error& error) {
  error = Error(kWhy);
  return nullptr;
}

std::unique_ptr<DeviceMemory> MakeCudaDeviceMemory(int, Error& error) {
  error = Error(kWhy);
  return nullptr;
}

}  // namespace muond::kernels
