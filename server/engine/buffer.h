// Memory of a backend, freed with its owner.
#pragma once

#include <cstddef>
#include <utility>

#include "kernels/backend.h"

namespace muond {

class Buffer {
 public:
  Buffer() = default;
  // `bytes` zeroed bytes; data() is null when the backend has none left (or bytes is 0).
  Buffer(kernels::Backend& backend, std::size_t bytes)
      : backend_(&backend), data_(bytes ? backend.Allocate(bytes) : nullptr), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) backend_->Free(data_);
  }

  bool ok() const { return data_ != nullptr || bytes_ == 0; }
  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  kernels::Backend* backend_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace muond
