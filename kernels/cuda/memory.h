// Memory that only grows, on the device and pinned on the host, so that a step allocates nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace muond::kernels::cuda {

enum class MemoryKind {
  kDevice,
  kPinned,  // host memory that the device can read and write at the same address
};

// Contents are lost on growth, and whoever grows must know that the device is done with the old
// memory. One thread at a time, with the right current device.
class GrowingBuffer {
 public:
  explicit GrowingBuffer(MemoryKind kind) : kind_(kind) {}
  GrowingBuffer(const GrowingBuffer&) = delete;
  GrowingBuffer& operator=(const GrowingBuffer&) = delete;
  ~GrowingBuffer() { Release(); }

  // Makes get() good for `bytes`; on an error the buffer is empty.
  cudaError_t Reserve(std::size_t bytes);
  // The same, and takes no more than that: for what is large.
  cudaError_t ReserveExactly(std::size_t bytes);
  template <typename T>
  T* get() const {
    return static_cast<T*>(memory_);
  }

 private:
  void Release();

  const MemoryKind kind_;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace muond::kernels::cuda
