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
using StagingBuffer =
    OwnedMemory<&kernels::Backend::AllocateStaging, &kernels::Backend::FreeStaging>;

}  // namespace muond
