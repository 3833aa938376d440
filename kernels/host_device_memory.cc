// Host memory as a device: plain copies, blocks from the heap.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/device_memory.h"
#include "proto/mutex.h"

namespace muond::kernels {
namespace {

// Blocks of this process by their handles.
struct Blocks {
  Mutex mutex;
  std::map<std::string, void*> by_handle MUOND_GUARDED_BY(mutex);
  std::uint64_t made MUOND_GUARDED_BY(mutex) = 0;
};

Blocks& AllBlocks() {
  static auto* const blocks = new Blocks();
  return *blocks;
}

template <typename Element>
std::uint64_t Sum(const void* data, std::size_t elements, std::uint64_t first) {
  constexpr std::size_t kPerWord = 8 / sizeof(Element);
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < elements;) {
    const std::uint64_t at = (first + i) % kPerWord;
    const std::size_t count = std::min<std::size_t>(kPerWord - at, elements - i);
    std::uint64_t word = 0;  // little endian, as everywhere here
    std::memcpy(&word, bytes + i * sizeof(Element), count * sizeof(Element));
    sum += (word << (8 * sizeof(Element) * at)) * SumFactor((first + i) / kPerWord);
    i += count;
  }
  return sum;
}

class HostDeviceMemory final : public DeviceMemory {
 public:
  explicit HostDeviceMemory(std::string uuid) : uuid_(std::move(uuid)) {}

  std::string_view uuid() const override { return uuid_; }
  Error AllocateShared(std::size_t bytes, SharedBlock* block) override {
    void* const data = std::aligned_alloc(kSharedBlockBytes, bytes);
    if (data == nullptr) return Error("no memory for " + std::to_string(bytes) + " bytes");
    std::memset(data, 0, bytes);
    Blocks& blocks = AllBlocks();
    MutexLock lock(blocks.mutex);
    char name[kSharedHandleBytes] = {};
    std::snprintf(name, sizeof(name), "host block %llu of this process",
                  static_cast<unsigned long long>(++blocks.made));
    *block = {data, std::string(name, sizeof(name))};
    blocks.by_handle[block->handle] = data;
    return {};
  }
  void FreeShared(void* data) override {
    Blocks& blocks = AllBlocks();
    {
      MutexLock lock(blocks.mutex);
      std::erase_if(blocks.by_handle, [&](const auto& entry) { return entry.second == data; });
    }
    std::free(data);
  }
  Error MoveAll(std::span<const MoveJob> jobs, std::span<std::uint64_t> sums) override {
    for (const MoveJob& job : jobs) {
      // What was copied is what is summed: the source is somebody else's.
      const void* from = job.src;
      if (job.dst != nullptr && job.elements > 0) {
        from = std::memcpy(job.dst, job.src, job.elements * job.element_bytes);
      }
      sums[job.sum] += SumOf(from, job.elements, job.element_bytes, job.first);
    }
    return {};
  }
  Error Write(void* dst, const void* host, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(dst, host, bytes);
    return {};
  }
  Error Read(void* host, const void* src, std::size_t bytes) override {
    return Write(host, src, bytes);
  }
  bool Reaches(const void* data, std::size_t) const override { return data != nullptr; }

 private:
  const std::string uuid_;
};

}  // namespace

std::uint64_t SumOf(const void* data, std::size_t elements, std::uint32_t element_bytes,
                    std::uint64_t first) {
  return element_bytes == 4 ? Sum<std::uint32_t>(data, elements, first)
                            : Sum<std::uint16_t>(data, elements, first);
}

std::unique_ptr<DeviceMemory> MakeHostDeviceMemory(std::string uuid) {
  return std::make_unique<HostDeviceMemory>(std::move(uuid));
}

void* OpenHostBlock(const std::string& handle) {
  Blocks& blocks = AllBlocks();
  MutexLock lock(blocks.mutex);
  const auto found = blocks.by_handle.find(handle);
  return found == blocks.by_handle.end() ? nullptr : found->second;
}

}  // namespace muond::kernels
