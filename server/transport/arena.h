// One arena: memory shared with one trainer, what lies where in it, and the checks of everything
// that the trainer says about it.
//
// An arena has windows for each direction and two fences for each window. The side that sends fills
// a window, sets its `filled` slot to the number of this use, and sends a message that names
// window, number and contents; the other side copies the contents out and sets `drained` likewise.
// With two windows one is filled while the other is drained. The daemon believes nothing that it
// reads here but numbers and bytes: places come from its own table, bytes are copied to where they
// belong before anything else looks at them, and it never waits for a slot.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/arena_memory.h"
#include "proto/mutex.h"

namespace muond::kernels {
class DeviceMemory;
}

namespace muond {

class GpuBlock;

// Whose arena it is.
struct ArenaOwner {
  std::string run;
  std::int64_t rank = 0;
  friend auto operator<=>(const ArenaOwner&, const ArenaOwner&) = default;
};

// Bytes [offset, offset + bytes) of an arena, and the slots that fence them.
struct ArenaWindow {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  std::int64_t filled = 0;
  std::int64_t drained = 0;
  bool to_daemon = false;
};

// What a trainer asks for: windows in each direction.
struct ArenaSize {
  std::int64_t window_bytes = 0;
  std::int64_t windows = 0;
  // Not null: in the memory of this GPU (gpu_arena.h), with one window of pull_bytes back.
  kernels::DeviceMemory* gpu = nullptr;
  std::int64_t pull_bytes = 0;
};

inline constexpr std::int64_t kArenaWindowBytesMin = 64 * 1024;
inline constexpr std::int64_t kArenaWindowsMax = 16;
inline constexpr std::int64_t kArenaPageBytes = 4096;

// The windows of an arena of that size, those to the daemon first, and the bytes of it all.
// INVALID_ARGUMENT for sizes that are no multiple of a page, too small or too many;
// RESOURCE_EXHAUSTED above `bytes_max`.
struct ArenaLayout {
  std::vector<ArenaWindow> windows;
  std::int64_t bytes = 0;
  std::int64_t gpu_bytes = 0;   // of a GPU's block, which windows lie in then; 0: of host memory
  std::int64_t gpu_handle = 0;  // where its handle is
};
absl::StatusOr<ArenaLayout> LayOutArena(const ArenaSize& size, std::int64_t bytes_max);

// OK iff these bytes lie inside a window that carries values in that direction; INVALID_ARGUMENT
// behind `object` else. The numbers may be anything.
absl::Status CheckRegion(const std::string& object, const ArenaLayout& layout, std::int64_t window,
                         std::int64_t offset, std::int64_t bytes, bool to_daemon);

class Arena {
 public:
  // `freed` is called with the arena's bytes when its last user has let go.
  static absl::StatusOr<std::shared_ptr<Arena>> Create(ArenaOwner owner, ArenaLayout layout,
                                                       std::function<void(std::int64_t)> freed,
                                                       std::shared_ptr<GpuBlock> gpu = nullptr);
  ~Arena();

  const std::string& handle() const { return handle_; }  // random; a secret of the trainer
  const ArenaOwner& owner() const { return owner_; }
  const ArenaLayout& layout() const { return layout_; }
  std::string object() const;  // for messages: run "r": arena of rank 3

  // The memory's descriptor, to be handed over once.
  int descriptor() const { return memory_.descriptor(); }
  void DropDescriptor() { memory_.DropDescriptor(); }

  // From here on every use is refused with FAILED_PRECONDITION.
  void Revoke() { revoked_ = true; }
  bool revoked() const { return revoked_; }

  // The trainer says that it has filled a window for the sequence-th time. INVALID_ARGUMENT for a
  // window that is none of those, FAILED_PRECONDITION when its fence does not say so.
  absl::Status CheckFilled(std::int64_t window, std::int64_t sequence) const;
  // A region of that window, which the trainer may write to at any moment: its bytes are to be read
  // once and judged where they were copied to. INVALID_ARGUMENT when it is not inside.
  absl::StatusOr<std::string_view> Region(std::int64_t window, std::int64_t offset,
                                          std::int64_t bytes) const;
  // Where a region of a window lies in the GPU's block: what the daemon reads, or writes. Errors as
  // Region, and INVALID_ARGUMENT where the arena is of host memory.
  absl::StatusOr<std::byte*> GpuRegion(std::int64_t window, std::int64_t offset,
                                       std::int64_t bytes, bool to_daemon) const;
  const GpuBlock* gpu() const { return gpu_.get(); }
  // All of it was copied. The slot never goes back, also when an older stream comes late.
  void SetDrained(std::int64_t window, std::int64_t sequence);

  // One stream at a time writes into the windows towards the trainer. UNAVAILABLE while another one
  // has not ended.
  absl::Status BeginPull();
  void EndPull() { pulling_ = false; }
  // Where the daemon may write: a window towards the trainer.
  std::byte* WindowData(std::int64_t window) const;
  void SetFilled(std::int64_t window, std::int64_t sequence) const;

 private:
  Arena(ArenaOwner owner, ArenaLayout layout, ArenaMemory memory, std::string handle,
        std::function<void(std::int64_t)> freed, std::shared_ptr<GpuBlock> gpu);
  absl::StatusOr<const ArenaWindow*> IncomingWindow(std::int64_t window) const;

  const ArenaOwner owner_;
  const ArenaLayout layout_;
  ArenaMemory memory_;
  const std::string handle_;
  const std::function<void(std::int64_t)> freed_;
  const std::shared_ptr<GpuBlock> gpu_;  // null: windows lie in memory_
  std::atomic<bool> revoked_{false}, pulling_{false};
  Mutex mutex_;  // of drained_
  // What the slots say, out of the trainer's reach.
  std::vector<std::int64_t> drained_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
