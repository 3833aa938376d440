// Asks the CUDA runtime, which is linked statically and looks for the driver itself.
#include "kernels/cuda/devices.h"

#include <cuda_runtime_api.h>

#include <cstdio>

namespace muond::kernels {
namespace {

// The oldest architecture in CMAKE_CUDA_ARCHITECTURES; newer ones run its code or compile the PTX.
constexpr int kLowestMajor = 8;

std::string UuidText(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof(byte), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += byte;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

std::string WhyNone(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
    case cudaErrorNoDevice:
      return "no NVIDIA GPU is visible to this process (CUDA_VISIBLE_DEVICES?)";
    case cudaErrorInsufficientDriver: {
      int driver = 0;
      if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        return "no NVIDIA driver is installed (libcuda.so.1 was not found)";
      }
      return "the NVIDIA driver is too old: it offers CUDA " + std::to_string(driver / 1000) + "." +
             std::to_string(driver % 1000 / 10) + ", this build needs " +
             std::to_string(CUDART_VERSION / 1000) + ".0";
    }
    default:
      return std::string("the CUDA runtime cannot start: ") + cudaGetErrorString(error);
  }
}

}  // namespace

CudaDevices ListCudaDevices() {
  CudaDevices list;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();  // or the next launch of this thread would report it
    list.why_none = WhyNone(error);
    return list;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    list.devices.push_back({.ordinal = i,
                            .name = properties.name,
                            .uuid = UuidText(properties.uuid),
                            .memory_bytes = properties.totalGlobalMem,
                            .capability_major = properties.major,
                            .capability_minor = properties.minor,
                            .usable = properties.major >= kLowestMajor});
  }
  if (list.devices.empty()) list.why_none = "the NVIDIA GPUs here do not answer";
  return list;
}

}  // namespace muond::kernels
