// The loss of the GPU example, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

// gradient = w - t, where t is 1 on the diagonal and 0 elsewhere; adds |gradient|^2 / 2 to *loss,
// which is device memory, too. Queued on the stream.
cudaError_t QueueGradient(const float* w, float* gradient, int rows, int cols, float* loss,
                          cudaStream_t stream);
