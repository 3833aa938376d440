// A GPU's slices on a path that takes host memory only: pinned copies, kept from step to step.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/gpu.h"
#include "client/cpp/session.h"

namespace muond::client {

// One thread at a time.
class Bounce {
 public:
  Bounce() = default;
  ~Bounce();
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  // The same sources with what lies on a GPU copied to the host; the copies stay until the next
  // call. RESOURCE_EXHAUSTED when there is no pinned memory left; errors of GpuDriver.
  absl::StatusOr<std::vector<SliceSource>> ToHost(const std::shared_ptr<GpuDriver>& driver,
                                                  std::span<const SliceSource> sources);
  // Host memory in the place of the GPU's; after it is filled, FromHost brings it there.
  absl::StatusOr<std::vector<SliceSink>> HostSinks(const std::shared_ptr<GpuDriver>& driver,
                                                   std::span<const SliceSink> sinks);
  absl::Status FromHost(std::span<const SliceSink> sinks, std::span<const SliceSink> hosts);

 private:
  using Key = std::tuple<std::string, std::int64_t, std::int64_t>;  // micro-batch -1: a sink's
  struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    int device = -1;
  };
  absl::StatusOr<void*> BufferFor(const Key& key, int device, std::size_t bytes);

  std::shared_ptr<GpuDriver> driver_;
  std::map<Key, Buffer> buffers_;
};

}  // namespace muond::client
