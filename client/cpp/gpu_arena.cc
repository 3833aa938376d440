#include "client/cpp/gpu_arena.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/arena.h"
#include "client/cpp/retry.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

bool Inside(std::int64_t offset, std::int64_t bytes, std::int64_t total) {
  return offset >= 0 && bytes >= 0 && bytes <= total && offset <= total - bytes;
}

bool SlotInside(std::int64_t slot, std::int64_t total) {
  return Inside(slot, 8, total) && slot % 8 == 0;
}

}  // namespace

void GpuLayout::Add(const std::string& parameter, std::int64_t slice, std::int64_t gradient_bytes,
                    std::int64_t parameter_bytes) {
  places_[{parameter, slice}] = {window_bytes_, gradient_bytes, pull_bytes_, parameter_bytes};
  window_bytes_ += (gradient_bytes + kUnit - 1) / kUnit * kUnit;
  pull_bytes_ += (parameter_bytes + kUnit - 1) / kUnit * kUnit;
}

std::int64_t GpuLayout::largest_gradient_bytes() const {
  std::int64_t largest = 0;
  for (const auto& [slice, place] : places_) largest = std::max(largest, place.gradient_bytes);
  return largest;
}

const GpuLayout::Place* GpuLayout::Find(const std::string& parameter, std::int64_t slice) const {
  const auto found = places_.find({parameter, slice});
  return found == places_.end() ? nullptr : &found->second;
}

absl::StatusOr<std::shared_ptr<GpuLink>> GpuLink::Attach(
    v1::Optimizer::Stub& stub, const GpuArenaRequest& request, GpuLayout layout,
    std::shared_ptr<GpuDriver> driver, absl::Time deadline, std::string* handle) {
  v1::OpenArenaRequest open;
  *open.mutable_id() = request.id;
  open.set_rank(request.rank);
  open.set_window_bytes(layout.window_bytes());
  open.set_windows(request.windows);
  open.set_pull_bytes(layout.pull_bytes());
  open.set_gpu(request.gpu);
  v1::OpenArenaReply opened;
  const CallResult result =
      CallOnce(stub, &v1::Optimizer::Stub::OpenArena, open, &opened, deadline);
  MUOND_RETURN_IF_ERROR(result.status);
  *handle = opened.handle();
  if (opened.gpu() != request.gpu) {
    return absl::InternalError(absl::StrFormat("run \"%s\": arena: asked for memory of GPU \"%s\", "
                                               "got some of \"%s\"",
                                               request.id.run(), request.gpu, opened.gpu()));
  }
  MUOND_ASSIGN_OR_RETURN(ReceivedArena received,
                         FetchArena(request.socket, opened, deadline - SteadyNow()));
  MUOND_ASSIGN_OR_RETURN(ArenaMemory memory,
                         ArenaMemory::Map(std::move(received.memory), opened.bytes()));
  memory.DropDescriptor();
  std::shared_ptr<GpuLink> link(new GpuLink(opened.handle(), std::move(received.connection),
                                            std::move(memory), std::move(layout),
                                            std::move(driver), request.device));
  MUOND_RETURN_IF_ERROR(link->TakeWindows(opened));
  MUOND_RETURN_IF_ERROR(link->Map(opened));
  return link;
}

absl::Status GpuLink::TakeWindows(const v1::OpenArenaReply& opened) {
  bool incoming = false;
  for (int i = 0; i < opened.windows_size(); ++i) {
    const v1::ArenaWindow& window = opened.windows(i);
    const std::int64_t needed =
        window.to_daemon() ? layout_.window_bytes() : layout_.pull_bytes();
    if (window.bytes() < needed || !Inside(window.offset(), window.bytes(), opened.gpu_bytes()) ||
        !SlotInside(window.filled(), opened.bytes()) ||
        !SlotInside(window.drained(), opened.bytes())) {
      return absl::InternalError(absl::StrFormat(
          "arena: window %d: it is not inside the arena, or not as large as was asked for", i));
    }
    if (window.to_daemon()) {
      outgoing_.push_back({window, i, 0});
    } else {
      incoming_ = {window, i, 0};
      incoming = true;
    }
  }
  if (incoming && !outgoing_.empty()) return absl::OkStatus();
  return absl::InternalError("arena: it has no windows");
}

absl::Status GpuLink::Map(const v1::OpenArenaReply& opened) {
  if (opened.gpu_handle_bytes() != static_cast<std::int64_t>(kGpuHandleBytes)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: memory handle: expected %d bytes, the daemon's has %d",
                        kGpuHandleBytes, opened.gpu_handle_bytes()));
  }
  if (!Inside(opened.gpu_handle(), opened.gpu_handle_bytes(), opened.bytes())) {
    return absl::InternalError("arena: the memory handle is not inside the arena");
  }
  const std::string handle(
      reinterpret_cast<const char*>(memory_.data()) + opened.gpu_handle(), kGpuHandleBytes);
  MUOND_ASSIGN_OR_RETURN(void* const mapped, driver_->Open(device_, handle));
  base_ = static_cast<std::byte*>(mapped);
  return absl::OkStatus();
}

GpuLink::~GpuLink() {
  if (base_ != nullptr) driver_->Close(device_, base_);
}

std::int64_t GpuLink::Fill(Window& window) const {
  memory_.Set(window.place.filled(), static_cast<std::uint64_t>(++window.sequence));
  return window.sequence;
}

}  // namespace muond::client
