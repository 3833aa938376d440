// Memory that a trainer's slices lie in when they do not come in messages: an arena of a GPU, or,
// for a trainer of this process, its own buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "kernels/device_memory.h"
#include "muond/v1/optimizer.pb.h"
#include "server/metrics/daemon_metrics.h"
#include "server/rpc/optimizer_service.h"

namespace muond {

// One call's view. Not thread-safe.
class ExchangeWindows {
 public:
  virtual ~ExchangeWindows() = default;
  virtual TransportPath path() const = 0;
  // What moves out of the windows, or reaches into them. Of a region that Region has returned.
  virtual kernels::DeviceMemory& MemoryOf(const std::byte* region) = 0;
  // The trainer says that it has filled a window: makes sure, and brings what is still on its way.
  virtual absl::Status Fetch(const v1::ArenaFill& fill) = 0;
  // Where a region lies. INVALID_ARGUMENT unless it is inside the window.
  virtual absl::StatusOr<std::byte*> Region(std::int64_t window, const v1::ArenaRegion& region,
                                            bool to_daemon) = 0;
  // The window is the trainer's again.
  virtual void Release(const v1::ArenaFill& fill) = 0;
  // A window towards the trainer holds what was asked for.
  virtual absl::Status Deliver(const v1::ExchangePull& pull) = 0;
  // Keeps the memory.
  virtual std::shared_ptr<void> keepalive() const = 0;
};

// By the handle that OpenArena returned, or pointers under this lease (proto/pointer_lease.h) where
// it is empty. FAILED_PRECONDITION when the
// rank has no such arena, PERMISSION_DENIED for pointers from another process.
absl::StatusOr<std::unique_ptr<ExchangeWindows>> FindWindows(const RpcContext& rpc,
                                                             const std::string& peer,
                                                             const std::string& handle,
                                                             std::int64_t lease,
                                                             const std::string& run,
                                                             std::int64_t rank);

}  // namespace muond
