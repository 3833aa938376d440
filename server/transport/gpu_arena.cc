#include "server/transport/gpu_arena.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

constexpr std::int64_t kSlotBytes = 64;     // fences of different windows share no cache line
constexpr std::int64_t kPlaceBytes = 256;   // windows begin and end at multiples
constexpr auto kBlockBytes = static_cast<std::int64_t>(kernels::kSharedBlockBytes);

std::int64_t UpTo(std::int64_t bytes, std::int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

absl::Status CheckBytes(const char* what, std::int64_t bytes) {
  if (bytes > 0 && bytes <= kGpuWindowBytesMax && bytes % kPlaceBytes == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("arena: %s: expected a multiple of %d up to %d, got %d", what, kPlaceBytes,
                      kGpuWindowBytesMax, bytes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuBlock>> GpuBlock::Allocate(kernels::DeviceMemory& memory,
                                                             std::int64_t bytes) {
  kernels::SharedBlock block;
  if (auto error = memory.AllocateShared(static_cast<std::size_t>(bytes), &block)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("arena: %d bytes of %s: %s", bytes, std::string(memory.uuid()),
                        error.message()));
  }
  return std::unique_ptr<GpuBlock>(new GpuBlock(memory, std::move(block)));
}

GpuBlock::~GpuBlock() { memory_.FreeShared(block_.data); }

absl::StatusOr<ArenaLayout> LayOutGpuArena(const ArenaSize& size) {
  if (size.windows < 1 || size.windows > kArenaWindowsMax) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "arena: windows: expected 1 to %d, got %d", kArenaWindowsMax, size.windows));
  }
  MUOND_RETURN_IF_ERROR(CheckBytes("window_bytes", size.window_bytes));
  MUOND_RETURN_IF_ERROR(CheckBytes("pull_bytes", size.pull_bytes));
  ArenaLayout layout;
  std::int64_t slot = 0, at = 0;
  for (std::int64_t i = 0; i <= size.windows; ++i) {
    const bool to_daemon = i < size.windows;
    const std::int64_t bytes = to_daemon ? size.window_bytes : size.pull_bytes;
    layout.windows.push_back({.offset = at,
                              .bytes = bytes,
                              .filled = slot,
                              .drained = slot + kSlotBytes,
                              .to_daemon = to_daemon});
    slot += 2 * kSlotBytes;
    at += bytes;
  }
  layout.gpu_handle = slot;
  layout.bytes = UpTo(slot + static_cast<std::int64_t>(kernels::kSharedHandleBytes),
                      kArenaPageBytes);
  layout.gpu_bytes = UpTo(at, kBlockBytes);
  return layout;
}

}  // namespace muond
