#include "server/transport/arena.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/transport/gpu_arena.h"

namespace muond {
namespace {

// Slots of different windows and sides share no cache line.
constexpr std::int64_t kSlotBytes = 64;

absl::StatusOr<std::string> RandomHandle() {
  std::string handle(kArenaHandleBytes, '\0');
  if (getrandom(handle.data(), handle.size(), 0) != static_cast<ssize_t>(handle.size())) {
    return absl::InternalError("arena: no random numbers for a handle");
  }
  return handle;
}

}  // namespace

absl::StatusOr<ArenaLayout> LayOutArena(const ArenaSize& size, std::int64_t bytes_max) {
  if (size.windows < 1 || size.windows > kArenaWindowsMax) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "arena: windows: expected 1 to %d, got %d", kArenaWindowsMax, size.windows));
  }
  if (size.window_bytes < kArenaWindowBytesMin || size.window_bytes % kArenaPageBytes != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "arena: window_bytes: expected a multiple of %d from %d on, got %d", kArenaPageBytes,
        kArenaWindowBytesMin, size.window_bytes));
  }
  const std::int64_t count = 2 * size.windows;
  const std::int64_t slots = count * 2 * kSlotBytes;
  const std::int64_t front = (slots + kArenaPageBytes - 1) / kArenaPageBytes * kArenaPageBytes;
  if (size.window_bytes > (bytes_max - front) / count) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "arena: %d windows of %d bytes: at most %d bytes are left (--max-arena-bytes)", count,
        size.window_bytes, bytes_max));
  }
  ArenaLayout layout;
  layout.bytes = front + count * size.window_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    layout.windows.push_back({.offset = front + i * size.window_bytes,
                              .bytes = size.window_bytes,
                              .filled = 2 * i * kSlotBytes,
                              .drained = (2 * i + 1) * kSlotBytes,
                              .to_daemon = i < size.windows});
  }
  return layout;
}

absl::Status CheckRegion(const std::string& object, const ArenaLayout& layout, std::int64_t window,
                         std::int64_t offset, std::int64_t bytes, bool to_daemon) {
  if (window < 0 || window >= std::ssize(layout.windows) ||
      layout.windows[window].to_daemon != to_daemon) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: window %d is not one for what goes to the %s", object, window,
                        to_daemon ? "daemon" : "trainer"));
  }
  const ArenaWindow& found = layout.windows[window];
  // Without a sum that could overflow.
  if (bytes < 0 || bytes > found.bytes || offset < found.offset ||
      offset - found.offset > found.bytes - bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: window %d: %d bytes at %d are not inside its %d bytes at %d", object, window, bytes,
        offset, found.bytes, found.offset));
  }
  return absl::OkStatus();
}

Arena::Arena(ArenaOwner owner, ArenaLayout layout, ArenaMemory memory, std::string handle,
             std::function<void(std::int64_t)> freed, std::shared_ptr<GpuBlock> gpu)
    : owner_(std::move(owner)),
      layout_(std::move(layout)),
      memory_(std::move(memory)),
      handle_(std::move(handle)),
      freed_(std::move(freed)),
      gpu_(std::move(gpu)),
      drained_(layout_.windows.size(), 0) {}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Create(ArenaOwner owner, ArenaLayout layout,
                                                     std::function<void(std::int64_t)> freed,
                                                     std::shared_ptr<GpuBlock> gpu) {
  MUOND_ASSIGN_OR_RETURN(ArenaMemory memory, ArenaMemory::Create(layout.bytes));
  MUOND_ASSIGN_OR_RETURN(std::string handle, RandomHandle());
  if (gpu != nullptr) {
    std::memcpy(memory.data() + layout.gpu_handle, gpu->handle().data(), gpu->handle().size());
  }
  return std::shared_ptr<Arena>(new Arena(std::move(owner), std::move(layout), std::move(memory),
                                          std::move(handle), std::move(freed), std::move(gpu)));
}

Arena::~Arena() {
  if (freed_ != nullptr) freed_(layout_.bytes);
}

std::string Arena::object() const {
  return absl::StrFormat("run \"%s\": arena of rank %d", owner_.run, owner_.rank);
}

absl::StatusOr<const ArenaWindow*> Arena::IncomingWindow(std::int64_t window) const {
  if (revoked_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: it was let go of: open another", object()));
  }
  if (window < 0 || window >= std::ssize(layout_.windows) || !layout_.windows[window].to_daemon) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: window %d is not one for what goes to the daemon", object(), window));
  }
  return &layout_.windows[window];
}

absl::Status Arena::CheckFilled(std::int64_t window, std::int64_t sequence) const {
  MUOND_ASSIGN_OR_RETURN(const ArenaWindow* const found, IncomingWindow(window));
  const std::uint64_t filled = memory_.Get(found->filled);
  if (sequence > 0 && filled == static_cast<std::uint64_t>(sequence)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s: window %d: announced as filled for the %d-th time, its fence says %d", object(), window,
      sequence, filled));
}

absl::StatusOr<std::string_view> Arena::Region(std::int64_t window, std::int64_t offset,
                                               std::int64_t bytes) const {
  MUOND_RETURN_IF_ERROR(IncomingWindow(window).status());
  if (gpu_ != nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: its windows are a GPU's: they take part in Exchange only", object()));
  }
  MUOND_RETURN_IF_ERROR(CheckRegion(object(), layout_, window, offset, bytes, /*to_daemon=*/true));
  return std::string_view(reinterpret_cast<const char*>(memory_.data() + offset),
                          static_cast<std::size_t>(bytes));
}

absl::StatusOr<std::byte*> Arena::GpuRegion(std::int64_t window, std::int64_t offset,
                                            std::int64_t bytes, bool to_daemon) const {
  if (revoked_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: it was let go of: open another", object()));
  }
  if (gpu_ == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: its windows are host memory: they take no part in Exchange", object()));
  }
  MUOND_RETURN_IF_ERROR(CheckRegion(object(), layout_, window, offset, bytes, to_daemon));
  return gpu_->data() + offset;
}

void Arena::SetDrained(std::int64_t window, std::int64_t sequence) {
  MutexLock lock(mutex_);
  drained_[window] = std::max(drained_[window], sequence);
  memory_.Set(layout_.windows[window].drained, static_cast<std::uint64_t>(drained_[window]));
}

absl::Status Arena::BeginPull() {
  if (!pulling_.exchange(true)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrFormat("%s: an earlier pull through it has not ended yet", object()));
}

std::byte* Arena::WindowData(std::int64_t window) const {
  return memory_.data() + layout_.windows[window].offset;
}

void Arena::SetFilled(std::int64_t window, std::int64_t sequence) const {
  memory_.Set(layout_.windows[window].filled, static_cast<std::uint64_t>(sequence));
}

}  // namespace muond
