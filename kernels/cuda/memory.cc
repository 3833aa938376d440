// Grow-only buffers over cudaMalloc and cudaHostAlloc.
#include "kernels/cuda/memory.h"

#include <algorithm>

namespace muond::kernels::cuda {
namespace {

// Tables and results of ordinary models fit at once.
constexpr std::size_t kLeastBytes = 256 * 1024;

}  // namespace

cudaError_t GrowingBuffer::Reserve(std::size_t bytes) {
  if (bytes <= bytes_) return cudaSuccess;
  // Half as much again, so that a series of growing batches settles soon.
  return ReserveExactly(std::max(bytes + bytes / 2, kLeastBytes));
}

cudaError_t GrowingBuffer::ReserveExactly(std::size_t target) {
  if (target <= bytes_) return cudaSuccess;
  Release();
  const cudaError_t error = kind_ == MemoryKind::kDevice
                                ? cudaMalloc(&memory_, target)
                                : cudaHostAlloc(&memory_, target, cudaHostAllocPortable);
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported by the return value, not by the next launch
    memory_ = nullptr;
    return error;
  }
  bytes_ = target;
  return cudaSuccess;
}

void GrowingBuffer::Release() {
  if (memory_ == nullptr) return;
  kind_ == MemoryKind::kDevice ? cudaFree(memory_) : cudaFreeHost(memory_);
  memory_ = nullptr;
  bytes_ = 0;
}

}  // namespace muond::kernels::cuda
