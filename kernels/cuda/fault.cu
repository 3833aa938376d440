#include "kernels/cuda/fault.h"

namespace muond::kernels::cuda {
namespace {

__global__ void TrapKernel() { __trap(); }

}  // namespace

bool DeviceLost() {
  cudaGetLastError();
  const cudaError_t left = cudaStreamQuery(cudaStreamPerThread);
  return left != cudaSuccess && left != cudaErrorNotReady;
}

cudaError_t Trap(cudaStream_t stream) {
  TrapKernel<<<1, 1, 0, stream>>>();
  const cudaError_t launched = cudaGetLastError();
  return launched == cudaSuccess ? cudaStreamSynchronize(stream) : launched;
}

}  // namespace muond::kernels::cuda
