// GPU memory as a session knows it: where a buffer lies, and the few things that a client has to do
// with it.
//
// The client links no CUDA. It takes the driver that the process has (libcuda.so.1, opened at run
// time) and works in each device's primary context, the one that the CUDA runtime, and torch with a
// runtime of its own, uses: pointers and streams of theirs are good here, and nobody's current
// context is changed for longer than a call. A process without a GPU never opens anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muond::client {

// Where a buffer lies, and whose work makes or reads what is in it.
struct GpuPlace {
  int device = -1;         // CUDA ordinal in this process; negative: host memory
  // cudaStream_t or CUstream (they are one thing); null: the default stream. A source's values are
  // those that the work queued there before the call leaves; a sink's are there for work queued
  // after the call has returned.
  void* stream = nullptr;

  bool on_gpu() const { return device >= 0; }
  friend bool operator==(const GpuPlace&, const GpuPlace&) = default;
};

inline constexpr std::size_t kGpuHandleBytes = 64;  // of a cudaIpcMemHandle_t

// What a session asks of the driver. Any thread. Errors name the device and what the driver said.
class GpuDriver {
 public:
  virtual ~GpuDriver() = default;

  // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" of the device with this ordinal. NOT_FOUND.
  virtual absl::StatusOr<std::string> Uuid(int device) = 0;
  // Maps memory that another process has allocated on that device; `handle` as it exported it,
  // kGpuHandleBytes long, else INVALID_ARGUMENT. FAILED_PRECONDITION when this process can't open
  // it: it is its own, or of a device or namespace that it does not see.
  virtual absl::StatusOr<void*> Open(int device, const std::string& handle) = 0;
  virtual void Close(int device, void* mapped) = 0;
  // Copies between any two kinds of memory, behind what is queued on the place's stream.
  virtual absl::Status Copy(const GpuPlace& place, void* to, const void* from,
                            std::size_t bytes) = 0;
  struct CopyJob {
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t bytes = 0;
  };
  // Copies within the place's device, in one go where it can.
  virtual absl::Status CopyAll(const GpuPlace& place, std::span<const CopyJob> jobs) {
    for (const CopyJob& job : jobs) {
      const absl::Status status = Copy(place, job.to, job.from, job.bytes);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  // Why CopyAll makes its copies one by one on that device; empty: it does not.
  virtual std::string WhyOneByOne(int /*device*/) { return "this driver has no other way"; }
  // Returns when all that is queued on the stream is done.
  virtual absl::Status Wait(const GpuPlace& place) = 0;
  // Memory of the device, 256-byte aligned, contents undefined; null when there is none left.
  virtual void* Allocate(int device, std::size_t bytes) = 0;
  virtual void Free(int device, void* memory) = 0;
  // Host memory that a device copies to and from at the link's rate; null when there is none left.
  virtual void* AllocatePinned(int device, std::size_t bytes) = 0;
  virtual void FreePinned(int device, void* memory) = 0;
};

// The machine's driver, loaded at the first call. UNAVAILABLE with the reason where there is none:
// no libcuda.so.1, no device.
absl::StatusOr<std::shared_ptr<GpuDriver>> LoadGpuDriver();

}  // namespace muond::client
