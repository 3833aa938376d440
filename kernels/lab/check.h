// What the lab's programs share: a CUDA call that fails ends the program with its place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/tensor.h"

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const cudaError_t status = (call);                                                      \
    if (status != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

inline void CheckError(const muond::kernels::Error& error) {
  if (!error) return;
  std::printf("error: %s\n", error.message().c_str());
  std::exit(1);
}
