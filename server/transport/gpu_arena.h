// Arenas in the memory of a GPU: the block that a trainer maps, and how it is laid out.
//
// The contract is that of every arena (arena.h); only the windows lie elsewhere. The memory that
// the socket hands over holds the fences and the handle of the block, so whoever may map the one
// may map the other. Windows towards the daemon hold a rank's whole gradient each, the one
// towards the trainer its parameters: one block and a table of places, no handle per tensor. A
// block is freed when its arena is, never recycled: what a trainer that died may still have
// mapped is nobody else's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device_memory.h"
#include "server/transport/arena.h"

namespace muond {

class GpuBlock {
 public:
  // RESOURCE_EXHAUSTED with what the driver said.
  static absl::StatusOr<std::unique_ptr<GpuBlock>> Allocate(kernels::DeviceMemory& memory,
                                                            std::int64_t bytes);
  ~GpuBlock();
  GpuBlock(const GpuBlock&) = delete;
  GpuBlock& operator=(const GpuBlock&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(block_.data); }
  const std::string& handle() const { return block_.handle; }
  kernels::DeviceMemory& memory() const { return memory_; }

 private:
  GpuBlock(kernels::DeviceMemory& memory, kernels::SharedBlock block)
      : memory_(memory), block_(std::move(block)) {}
  kernels::DeviceMemory& memory_;
  const kernels::SharedBlock block_;
};

inline constexpr std::int64_t kGpuWindowBytesMax = std::int64_t{1} << 40;

// Windows of `size.gpu`: size.windows of window_bytes towards the daemon, then one of pull_bytes.
// `bytes` of the result is what the socket hands over, `gpu_bytes` the block. INVALID_ARGUMENT for
// sizes that are no multiple of 256, not positive, too many or beyond any device.
absl::StatusOr<ArenaLayout> LayOutGpuArena(const ArenaSize& size);

}  // namespace muond
