// What a machine with and without a driver says about its devices.
#include "kernels/cuda/devices.h"

#include <gtest/gtest.h>

#include "kernels/cuda/cuda_backend.h"

namespace muond::kernels {
namespace {

TEST(CudaDevices, ListIsEmptyOnlyForAReason) {
  const CudaDevices list = ListCudaDevices();
  EXPECT_EQ(list.devices.empty(), !list.why_none.empty()) << list.why_none;
  for (const CudaDevice& device : list.devices) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_EQ(device.uuid.size(), 40u) << device.uuid;
    EXPECT_EQ(device.uuid.rfind("GPU-", 0), 0u) << device.uuid;
    EXPECT_GT(device.memory_bytes, std::size_t{1} << 30);
  }
}

TEST(CudaDevices, RefusalNamesTheDeviceAndTheCause) {
  for (const int ordinal : {-1, 1000}) {
    Error error;
    EXPECT_EQ(MakeCudaBackend(ordinal, {}, error), nullptr);
    const std::string object = "cuda device " + std::to_string(ordinal) + ": ";
    EXPECT_EQ(error.message().rfind(object, 0), 0u) << error.message();
    EXPECT_GT(error.message().size(), object.size());
  }
}

}  // namespace
}  // namespace muond::kernels
