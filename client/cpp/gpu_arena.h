// A trainer's end of an arena in a GPU's memory: the daemon's block, mapped here, and where each
// slice has its place in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/gpu.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/arena_memory.h"

namespace muond::client {

// The places of a rank's slices, of what one daemon owns of them: the same in every window of a
// direction. Immutable once the arena is open.
class GpuLayout {
 public:
  struct Place {
    std::int64_t gradient = 0, gradient_bytes = 0;    // from a window's start
    std::int64_t parameter = 0, parameter_bytes = 0;  // likewise
    friend bool operator==(const Place&, const Place&) = default;
  };

  void Add(const std::string& parameter, std::int64_t slice, std::int64_t gradient_bytes,
           std::int64_t parameter_bytes);
  // Null when the daemon owns nothing of it.
  const Place* Find(const std::string& parameter, std::int64_t slice) const;
  // Never 0: a rank may hold nothing.
  std::int64_t window_bytes() const { return std::max(window_bytes_, kUnit); }
  // Of the largest slice.
  std::int64_t largest_gradient_bytes() const;
  std::int64_t pull_bytes() const { return std::max(pull_bytes_, kUnit); }
  friend bool operator==(const GpuLayout&, const GpuLayout&) = default;

 private:
  static constexpr std::int64_t kUnit = 256;  // places begin at multiples
  std::map<std::pair<std::string, std::int64_t>, Place> places_;
  std::int64_t window_bytes_ = 0, pull_bytes_ = 0;
};

struct GpuArenaRequest {
  v1::RunId id;
  std::int64_t rank = 0;
  std::int64_t windows = 0;  // towards the daemon
  int device = 0;            // ordinal of the trainer's GPU
  std::string gpu;           // its UUID
  std::string socket;        // as ArenaRequest's
};

// One thread at a time.
class GpuLink {
 public:
  // As ArenaLink::Attach; errors also those of GpuDriver::Open.
  static absl::StatusOr<std::shared_ptr<GpuLink>> Attach(
      v1::Optimizer::Stub& stub, const GpuArenaRequest& request, GpuLayout layout,
      std::shared_ptr<GpuDriver> driver, absl::Time deadline, std::string* handle);
  ~GpuLink();
  GpuLink(const GpuLink&) = delete;
  GpuLink& operator=(const GpuLink&) = delete;

  struct Window {
    v1::ArenaWindow place;
    std::int64_t index = 0;
    std::int64_t sequence = 0;  // of its last use
  };

  const std::string& handle() const { return handle_; }
  const GpuLayout& layout() const { return layout_; }
  std::vector<Window>& outgoing() { return outgoing_; }
  Window& incoming() { return incoming_; }
  std::byte* base() const { return base_; }
  std::byte* At(const Window& window, std::int64_t offset) const {
    return base_ + window.place.offset() + offset;
  }
  // The next use of a window: sets its fence.
  std::int64_t Fill(Window& window) const;
  bool Filled(const Window& window, std::int64_t sequence) const {
    return memory_.Get(window.place.filled()) == static_cast<std::uint64_t>(sequence);
  }
  // The daemon is gone or has let go of the arena.
  bool lost() const { return ArenaHungUp(connection_.get()); }

 private:
  GpuLink(std::string handle, Descriptor connection, ArenaMemory memory, GpuLayout layout,
          std::shared_ptr<GpuDriver> driver, int device)
      : handle_(std::move(handle)),
        connection_(std::move(connection)),
        memory_(std::move(memory)),
        layout_(std::move(layout)),
        driver_(std::move(driver)),
        device_(device) {}
  absl::Status Map(const v1::OpenArenaReply& opened);
  absl::Status TakeWindows(const v1::OpenArenaReply& opened);

  const std::string handle_;
  const Descriptor connection_;
  const ArenaMemory memory_;  // fences, and the block's handle
  const GpuLayout layout_;
  const std::shared_ptr<GpuDriver> driver_;
  const int device_;
  std::byte* base_ = nullptr;
  std::vector<Window> outgoing_;
  Window incoming_;
};

}  // namespace muond::client
