// What the NCCL transport needs of a GPU: memory, streams, events, and a sum of what lies there.
// One implementation is over the CUDA runtime (cuda_device.h); tests have another over host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nccl/api.h"
#include "nccl/sum.h"

namespace muond::nccl {

using Event = void*;

// Thread-safe; calls about one stream come from one thread at a time. Sizes are in bytes. Errors
// are INTERNAL with the runtime's words, RESOURCE_EXHAUSTED where memory is out.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string uuid() const = 0;  // "GPU-...", as nvidia-smi -L prints

  // Makes this the calling thread's device: before NCCL is called there.
  virtual absl::Status MakeCurrent() = 0;

  virtual absl::StatusOr<void*> Allocate(std::size_t bytes) = 0;
  virtual void Free(void* memory) = 0;

  virtual absl::StatusOr<Stream> NewStream() = 0;
  virtual void FreeStream(Stream stream) = 0;
  // What is given to `stream` from now on waits for what was given to `after` before. `after` may
  // be null: the default stream.
  virtual absl::Status Order(Stream stream, Stream after) = 0;

  // From device to device, in the stream's order.
  virtual absl::Status Copy(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  // Between host and device; return when it is done, and wait for nothing else.
  virtual absl::Status ToHost(void* host, const void* from, std::size_t bytes) = 0;
  virtual absl::Status FromHost(void* to, const void* host, std::size_t bytes) = 0;

  // sums[i] is that of jobs[i] (sum.h), whose memory is on this device, in the stream's order;
  // returns when all are there.
  virtual absl::Status Sum(std::span<const SumJob> jobs, std::span<std::uint64_t> sums,
                           Stream stream) = 0;

  // An event that is done when all that was given to the stream before is.
  virtual absl::StatusOr<Event> Record(Stream stream) = 0;
  virtual absl::StatusOr<bool> Done(Event event) = 0;
  virtual void FreeEvent(Event event) = 0;
};

}  // namespace muond::nccl
