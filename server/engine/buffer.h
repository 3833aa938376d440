// Memory of a backend, freed with its owner.
#pragma once

#include <cstddef>
#include <utility>

#include "kernels/backend.h"

namespace muond {

template <void* (kernels::Backend::*kAllocate)(std::size_t), void (kernels::Backend::*kFree)(void*)>
class OwnedMemory {
 public:
  OwnedMemory() = default;
  // data() is null when the backend has no `bytes` left (or bytes is 0).
  OwnedMemory(kernels::Backend& backend, std::size_t bytes)
      : backend_(&backend), data_(bytes ? (backend.*kAllocate)(bytes) : nullptr), bytes_(bytes) {}
  OwnedMemory(OwnedMemory&& other) noexcept { *this = std::move(other); }
  OwnedMemory& operator=(OwnedMemory&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~OwnedMemory() {
    if (data_ != nullptr) (backend_->*kFree)(data_);
  }

  bool ok() const { return data_ != nullptr || bytes_ == 0; }
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }
  std::size_t bytes() const { return bytes_; }
  const kernels::Backend* backend() const { return backend_; }

 private:
  kernels::Backend* backend_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// The backend's own memory, zeroed: what the host may touch only where Backend::host_memory().
using Buffer = OwnedMemory<&kernels::Backend::Allocate, &kernels::Backend::Free>;

// Host memory that incoming bytes are written to, contents undefined.
using HostStaging =
    OwnedMemory<&kernels::Backend::AllocateStaging, &kernels::Backend::FreeStaging>;

// Where incoming bytes are written to: in host memory, or where the backend computes.
enum class StagingPlace : unsigned char { kHost, kBackend };

class StagingBuffer {
 public:
  StagingBuffer() = default;
  // ok() is false when there is no memory left.
  StagingBuffer(kernels::Backend& backend, std::size_t bytes,
                StagingPlace place = StagingPlace::kHost)
      : place_(place) {
    if (place == StagingPlace::kHost) {
      host_ = HostStaging(backend, bytes);
    } else {
      own_ = Buffer(backend, bytes);
    }
  }

  StagingPlace place() const { return place_; }
  bool ok() const { return host_.ok() && own_.ok(); }
  void* data() const { return on_host() ? host_.data() : own_.data(); }
  std::size_t bytes() const { return on_host() ? host_.bytes() : own_.bytes(); }
  const kernels::Backend* backend() const { return on_host() ? host_.backend() : own_.backend(); }

 private:
  bool on_host() const { return place_ == StagingPlace::kHost; }
  StagingPlace place_ = StagingPlace::kHost;
  HostStaging host_;
  Buffer own_;
};

}  // namespace muond
