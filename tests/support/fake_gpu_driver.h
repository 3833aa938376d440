// A GPU's driver without a GPU: device memory is plain memory, a handle opens what
// kernels::MakeHostDeviceMemory has shared in this process.
#pragma once

#include <atomic>
#include <cstring>
#include <string>

#include "absl/strings/str_format.h"
#include "client/cpp/gpu.h"
#include "kernels/device_memory.h"

namespace muond::testing {

class FakeGpuDriver final : public client::GpuDriver {
 public:
  // What the device with this ordinal is called.
  static std::string NameOf(int device) { return absl::StrFormat("GPU-fake-%d", device); }

  absl::StatusOr<std::string> Uuid(int device) override { return NameOf(device); }
  absl::StatusOr<void*> Open(int, const std::string& handle) override {
    void* const block = refuse_open ? nullptr : kernels::OpenHostBlock(handle);
    if (block == nullptr) return absl::FailedPreconditionError("open: no such block");
    ++open;
    return block;
  }
  void Close(int, void*) override { --open; }
  absl::Status Copy(const client::GpuPlace&, void* to, const void* from,
                    std::size_t bytes) override {
    std::memcpy(to, from, bytes);
    copied += static_cast<std::int64_t>(bytes);
    return absl::OkStatus();
  }
  absl::Status Wait(const client::GpuPlace&) override {
    ++waits;
    return absl::OkStatus();
  }
  void* Allocate(int, std::size_t bytes) override { return ::operator new(bytes); }
  void Free(int, void* memory) override { ::operator delete(memory); }
  void* AllocatePinned(int, std::size_t bytes) override { return ::operator new(bytes); }
  void FreePinned(int, void* memory) override { ::operator delete(memory); }

  std::atomic<bool> refuse_open{false};
  std::atomic<int> open{0}, waits{0};  // mappings that are open; calls
  std::atomic<std::int64_t> copied{0};  // bytes
};

}  // namespace muond::testing
