#include "kernels/host_memory.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace muond::kernels {
namespace {

constexpr std::size_t kMebibyte = std::size_t{1} << 20;

std::size_t ResidentMebibytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / kMebibyte;
}

TEST(HostMemory, IsZeroedAlignedAndWritable) {
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{4097},
        kMebibyte - 1, kMebibyte, kMebibyte + 1, 17 * kMebibyte + 5}) {
    auto* const memory = static_cast<unsigned char*>(AllocateHost(bytes));
    ASSERT_NE(memory, nullptr) << bytes;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u) << bytes;
    std::size_t set = 0;
    for (std::size_t i = 0; i < bytes; ++i) set += memory[i] != 0;
    EXPECT_EQ(set, 0u) << bytes;
    std::memset(memory, 0xff, bytes);
    FreeHost(memory);
  }
  FreeHost(nullptr);
  EXPECT_EQ(AllocateHost(SIZE_MAX), nullptr);
  EXPECT_EQ(AllocateHost(SIZE_MAX / 4), nullptr);
}

// glibc raises its own threshold for mappings with the first such block that is freed, and keeps
// later ones in the arena of whichever thread asked.
TEST(HostMemory, FreedTensorsLeaveTheProcess) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer keeps freed memory";
#endif
  FreeHost(AllocateHost(12 * kMebibyte));
  const std::size_t before = ResidentMebibytes();
  std::thread([] {
    std::vector<void*> tensors;
    void* pin = nullptr;  // a small block behind a large one keeps an arena from shrinking
    for (int i = 0; i < 16; ++i) {
      tensors.push_back(AllocateHost(12 * kMebibyte));
      pin = AllocateHost(64);
    }
    for (void* tensor : tensors) FreeHost(tensor);
    FreeHost(pin);
  }).join();
  EXPECT_LT(ResidentMebibytes(), before + 24);
}

}  // namespace
}  // namespace muond::kernels
