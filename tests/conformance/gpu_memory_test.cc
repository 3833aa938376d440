// What moves bytes about on a GPU, held to what the host makes of the same bytes: sums of moves and
// of NCCL's transfers, and copies of many pieces at once, at every alignment and length.
// Skipped, loudly, where there is no GPU; MUOND_REQUIRE_GPU=1 makes that a failure.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/cpp/gpu.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/devices.h"
#include "kernels/device_memory.h"
#include "nccl/cuda/cuda_device.h"
#include "nccl/sum.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Must;

constexpr std::size_t kBytes = kernels::kSharedBlockBytes;

class GpuMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    const kernels::CudaDevices list = kernels::ListCudaDevices();
    if (list.devices.empty()) {
      ASSERT_EQ(std::getenv("MUOND_REQUIRE_GPU"), nullptr) << "a GPU is needed";
      GTEST_SKIP() << "no GPU: " << list.why_none;
    }
    uuid_ = list.devices[0].uuid;
    kernels::Error error;
    memory_ = kernels::MakeCudaDeviceMemory(0, error);
    ASSERT_NE(memory_, nullptr) << error.message();
    for (kernels::SharedBlock* block : {&from_, &to_}) {
      ASSERT_FALSE(memory_->AllocateShared(kBytes, block));
    }
    std::mt19937_64 random(7);
    for (std::size_t i = 0; i < kBytes; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(bytes_.data() + i, &word, 8);
    }
    ASSERT_FALSE(memory_->Write(from_.data, bytes_.data(), kBytes));
  }
  void TearDown() override {
    if (memory_ == nullptr) return;
    for (kernels::SharedBlock* block : {&from_, &to_}) memory_->FreeShared(block->data);
  }
  char* From(std::size_t offset) const { return static_cast<char*>(from_.data) + offset; }
  char* To(std::size_t offset) const { return static_cast<char*>(to_.data) + offset; }
  std::string Moved() {
    std::string moved(kBytes, '\0');
    EXPECT_FALSE(memory_->Read(moved.data(), to_.data, kBytes));
    return moved;
  }

  std::string uuid_;
  std::unique_ptr<kernels::DeviceMemory> memory_;
  kernels::SharedBlock from_, to_;
  std::string bytes_ = std::string(kBytes, '\0');
};

constexpr std::size_t kLengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 31, 1000, 4096, 4099, 100003};
constexpr std::uint64_t kFirsts[] = {0, 1, 2, 3, 4, 5, 70001, (std::uint64_t{1} << 33) + 3};

TEST_F(GpuMemory, MovesCopyAndSumAsTheHostDoes) {
  for (const std::uint32_t size : {2u, 4u}) {
    for (const std::size_t length : kLengths) {
      for (const std::size_t shift : {0u, 1u, 4u}) {
        std::vector<kernels::MoveJob> jobs;
        for (const std::uint64_t first : kFirsts) {
          const auto number = static_cast<std::uint32_t>(jobs.size());
          // The first of all is only summed, the others go to places side by side.
          char* const to = number == 0 ? nullptr : To(16 + (number - 1) * length * size);
          jobs.push_back({to, From(shift * size), length, size, number, first});
          if (16 + (number + 1) * length * size > kBytes) break;
        }
        std::vector<std::uint64_t> sums(jobs.size(), 0);
        ASSERT_FALSE(memory_->MoveAll(jobs, sums));
        const std::string moved = Moved();
        for (std::size_t i = 0; i < jobs.size(); ++i) {
          const char* const expected = bytes_.data() + shift * size;
          EXPECT_EQ(sums[i], kernels::SumOf(expected, length, size, jobs[i].first))
              << size << " bytes, " << length << " elements from " << shift << ", first "
              << jobs[i].first;
          if (i == 0 || length == 0) continue;
          EXPECT_EQ(std::memcmp(moved.data() + 16 + (i - 1) * length * size, expected,
                                length * size),
                    0);
        }
      }
    }
  }
}

TEST_F(GpuMemory, SumsOfTransfersAreThoseOfMoves) {
  const auto device = Must(nccl::OpenCudaDevice(uuid_));
  const nccl::Stream stream = Must(device->NewStream());
  std::vector<nccl::SumJob> jobs;
  for (const std::uint64_t size : {2u, 4u}) {
    for (const std::size_t length : kLengths) {
      for (const std::size_t shift : {0u, 1u, 8u}) {
        for (const std::uint64_t first : kFirsts) {
          jobs.push_back({From(shift * size), length, first, size});
        }
      }
    }
  }
  std::vector<std::uint64_t> sums(jobs.size(), 0);
  ASSERT_TRUE(device->Sum(jobs, sums, stream).ok());
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const nccl::SumJob& job = jobs[i];
    const char* const host = bytes_.data() + (static_cast<const char*>(job.data) - From(0));
    EXPECT_EQ(sums[i], kernels::SumOf(host, job.elements,
                                      static_cast<std::uint32_t>(job.element_bytes), job.first))
        << i;
    EXPECT_EQ(sums[i], nccl::SumOnHost({host, job.elements, job.first, job.element_bytes})) << i;
  }
  device->FreeStream(stream);
}

TEST_F(GpuMemory, ManyPiecesAreCopiedAtOnce) {
  const auto driver = Must(client::LoadGpuDriver());
  EXPECT_EQ(driver->WhyOneByOne(0), "");
  std::vector<client::GpuDriver::CopyJob> jobs;
  std::string expected(kBytes, '\0');
  ASSERT_FALSE(memory_->Write(to_.data, expected.data(), kBytes));
  // More than one launch takes; gaps between them stay as they are.
  std::size_t at = 0;
  for (std::size_t i = 0; i < 300; ++i) {
    const std::size_t bytes = i == 17 ? std::size_t{1} << 20 : 2 * (i * i % 331);
    const std::size_t from = 16 * i + 2 * (i % 3);
    at += i % 2 == 0 ? (16 - at % 16) % 16 : 2;
    if (at + bytes > kBytes || from + bytes > kBytes) break;
    jobs.push_back({To(at), From(from), bytes});
    std::memcpy(expected.data() + at, bytes_.data() + from, bytes);
    at += bytes;
  }
  ASSERT_EQ(jobs.size(), 300);
  const client::GpuPlace place{.device = 0};
  ASSERT_TRUE(driver->CopyAll(place, jobs).ok());
  ASSERT_TRUE(driver->Wait(place).ok());
  EXPECT_EQ(Moved(), expected);
}

}  // namespace
}  // namespace muond::conformance
