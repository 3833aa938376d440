// Tensor maps: how the copy engine finds boxes of 64 x 64 values in a matrix.
#include <string>

#include "kernels/cuda/gemm.h"

namespace muond::kernels::cuda {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up at run time: libcuda is never linked.
EncodeFunction FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<EncodeFunction>(function);
}

}  // namespace

Error EncodeMatrixMap(CUtensorMap* map, const __half* data, std::int64_t rows, std::int64_t cols,
                      std::int64_t ld) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) return Error("the CUDA driver has no cuTensorMapEncodeTiled");
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(ld) * sizeof(__half)};
  const cuuint32_t box[2] = {kBoxSide, kBoxSide};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<__half*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return Error("tensor map of " + std::to_string(rows) + " x " + std::to_string(cols) +
               " values: cuTensorMapEncodeTiled failed with " + std::to_string(result));
}

}  // namespace muond::kernels::cuda
