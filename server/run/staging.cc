#include "server/run/staging.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/run/free_memory.h"

namespace muond {
namespace {

// Others take memory meanwhile: never more than this is allocated on the strength of one answer.
constexpr std::int64_t kRoomBytes = std::int64_t{64} << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<StagingBuffer>> Staging::Acquire(kernels::Backend& backend,
                                                                std::int64_t elements, Dtype dtype,
                                                                StagingPlace place) {
  const std::size_t bytes = static_cast<std::size_t>(elements) * DtypeBytes(dtype);
  for (ByKind* kept : {&released_, &spare_}) {
    if (std::shared_ptr<StagingBuffer> memory = Take(*kept, {&backend, place, bytes})) {
      return memory;
    }
  }
  // A device knows by itself what it has.
  if (place == StagingPlace::kHost || bytes_max_ > 0) {
    MUOND_RETURN_IF_ERROR(CheckRoom(static_cast<std::int64_t>(bytes)));
  }
  auto memory = std::make_shared<StagingBuffer>(backend, bytes, place);
  if (!memory->ok()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("staging: allocate gradient tensor: no memory for %d bytes", bytes));
  }
  bytes_ += static_cast<std::int64_t>(bytes);
  return memory;
}

absl::Status Staging::CheckRoom(std::int64_t bytes) {
  if (bytes_max_ > 0) {
    if (bytes_ + bytes <= bytes_max_) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrFormat(
        "staging: gradient tensor of %d bytes: %d bytes are staged, at most %d beside the state "
        "(--max-run-bytes)",
        bytes, bytes_, bytes_max_));
  }
  // Asking the kernel takes tens of microseconds: once for many small tensors.
  if (bytes <= room_) {
    room_ -= bytes;
    return absl::OkStatus();
  }
  const std::int64_t free = FreeMemoryBytes();
  if (free == 0) return absl::OkStatus();
  if (bytes <= free) {
    room_ = std::min(free - bytes, kRoomBytes);
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "staging: gradient tensor of %d bytes: the machine has %d bytes free", bytes, free));
}

// Null when there is none of that kind. A buffer that was released while the executor, or a late
// stream, still held it becomes usable later.
std::shared_ptr<StagingBuffer> Staging::Take(ByKind& from, const Kind& kind) {
  for (auto [at, end] = from.equal_range(kind); at != end; ++at) {
    if (at->second.use_count() > 1) continue;
    std::shared_ptr<StagingBuffer> memory = std::move(at->second);
    from.erase(at);
    return memory;
  }
  return nullptr;
}

void Staging::Trim() {
  for (const auto& [kind, memory] : spare_) bytes_ -= static_cast<std::int64_t>(std::get<2>(kind));
  spare_ = std::exchange(released_, {});
}

void Staging::Release(std::shared_ptr<StagingBuffer> memory) {
  const Kind kind{memory->backend(), memory->place(), memory->bytes()};
  released_.emplace(kind, std::move(memory));
}

}  // namespace muond
