// Aligned host memory: tensors are mappings of their own, small things come from the allocator.
#include "kernels/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

namespace muond::kernels {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kAddressable = std::size_t{1} << 47;  // by a process of today's processors
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// From here on a partly used last huge page is less than an eighth of the whole.
constexpr std::size_t kHugePageBytes = 8 * kHugePage;
// From here on memory is mapped: malloc would keep it when it is freed, in the arena of whichever
// thread asked, and the process would hold tensors that are long gone.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kMappedBytes = std::numeric_limits<std::size_t>::max();  // guard all of it
#else
constexpr std::size_t kMappedBytes = std::size_t{1} << 20;
#endif

// Lies in the kAlignment bytes before what is handed out.
struct Origin {
  void* memory = nullptr;
  std::size_t mapped_bytes = 0;  // 0: from the allocator
};
static_assert(sizeof(Origin) <= kAlignment);

Origin* OriginOf(void* handed_out) {
  return reinterpret_cast<Origin*>(static_cast<std::byte*>(handed_out) - kAlignment);
}

void* HandOut(std::byte* memory, std::size_t offset, std::size_t mapped_bytes, std::size_t bytes) {
  std::byte* const out = memory + offset;
  new (OriginOf(out)) Origin{memory, mapped_bytes};
  std::memset(out, 0, bytes);  // takes the pages now: a step must not find that there are none
  return out;
}

void* Map(std::size_t bytes) {
  const bool huge = bytes >= kHugePageBytes;
  const std::size_t alignment = huge ? kHugePage : kPage;
  const std::size_t mapped = bytes + 2 * alignment;
  void* const memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t offset = (address + alignment) / alignment * alignment - address;
  std::byte* const first = static_cast<std::byte*>(memory);
  // Fewer misses in the processor's page tables: passes over large tensors gain 5-20 %.
  if (huge) madvise(first + offset, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return HandOut(first, offset, mapped, bytes);
}

}  // namespace

void* AllocateHost(std::size_t bytes) {
  if (bytes > kAddressable) return nullptr;
  if (bytes >= kMappedBytes) return Map(bytes);
  // aligned_alloc wants a multiple of the alignment.
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  void* const memory = std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) return nullptr;
  return HandOut(static_cast<std::byte*>(memory), kAlignment, 0, bytes);
}

void FreeHost(void* memory) {
  if (memory == nullptr) return;
  const Origin origin = *OriginOf(memory);
  if (origin.mapped_bytes > 0) {
    munmap(origin.memory, origin.mapped_bytes);
  } else {
    std::free(origin.memory);
  }
}

std::size_t FreeHostBytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::size_t kibibytes = 0;
  while (file >> name >> kibibytes) {
    if (name == "MemAvailable:") return kibibytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

float* HostScratch::Reserve(std::size_t floats) {
  if (floats > floats_ || memory_ == nullptr) {
    FreeHost(memory_);
    memory_ = AllocateHost(floats * sizeof(float));
    floats_ = memory_ == nullptr ? 0 : floats;
  }
  return static_cast<float*>(memory_);
}

}  // namespace muond::kernels
