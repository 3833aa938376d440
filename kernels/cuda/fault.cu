#include "kernels/cuda/fault.h"

namespace muond::kernels::cuda {
namespace {

__global__ void TrapKernel() { __trap(); }

}  // namespace

bool DeviceLost() {
  cudaGetLastError();
  const cudaError_t left = cudaStreamQuery(cudaStreamPerThread);
  // A thread's stream is made when it is first asked for, which takes memory that may be all gone.
  return left != cudaSuccess && left != cudaErrorNotReady && left != cudaErrorMemoryAllocation;
}

cudaError_t Trap(cudaStream_t stream) {
  TrapKernel<<<1, 1, 0, stream>>>();
  const cudaError_t launched = cudaGetLastError();
  return launched == cudaSuccess ? cudaStreamSynchronize(stream) : launched;
}

}  // namespace muond::kernels::cuda
