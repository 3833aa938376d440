// What the device can do at best: copy, read, multiply; and the link to the host.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cuda/benchmark/benchmark.h"
#include "kernels/cuda/benchmark/device_data.h"

namespace muond::kernels::cuda {
namespace {

void CheckCuda(cudaError_t error) {
  if (error != cudaSuccess) Check(Error(cudaGetErrorString(error)));
}

// Seconds on the device, the median of `repeats`.
template <typename Call>
double DeviceSeconds(int repeats, const Call& call) {
  cudaEvent_t begin, end;
  CheckCuda(cudaEventCreate(&begin));
  CheckCuda(cudaEventCreate(&end));
  std::vector<float> milliseconds;
  for (int i = 0; i <= repeats; ++i) {
    CheckCuda(cudaEventRecord(begin));
    call();
    CheckCuda(cudaEventRecord(end));
    CheckCuda(cudaEventSynchronize(end));
    float spent = 0;
    CheckCuda(cudaEventElapsedTime(&spent, begin, end));
    if (i > 0) milliseconds.push_back(spent);
  }
  CheckCuda(cudaEventDestroy(begin));
  CheckCuda(cudaEventDestroy(end));
  std::nth_element(milliseconds.begin(), milliseconds.begin() + repeats / 2, milliseconds.end());
  return milliseconds[static_cast<std::size_t>(repeats / 2)] * 1e-3;
}

double ProductRate(Backend& backend, int n) {
  const auto count = static_cast<std::size_t>(n) * static_cast<std::size_t>(n);
  DeviceArray a(backend, Dtype::kBF16, count), b(backend, Dtype::kBF16, count),
      c(backend, Dtype::kBF16, count);
  a.FillGaussian(1, 1);
  b.FillGaussian(1, 2);
  cublasHandle_t handle;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) Check(Error("cuBLAS cannot start"));
  const float one = 1, zero = 0;
  const double seconds = DeviceSeconds(10, [&] {
    const cublasStatus_t status = cublasGemmEx(
        handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a.at(0), CUDA_R_16BF, n, b.at(0),
        CUDA_R_16BF, n, &zero, c.at(0), CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) Check(Error("cublasGemmEx failed"));
  });
  cublasDestroy(handle);
  return 2.0 * n * n * n / seconds;
}

void MeasureLink(Benchmark& benchmark) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  Backend& backend = benchmark.backend();
  const DeviceArray device(backend, Dtype::kF32, kBytes / 4), acc(backend, Dtype::kF32, kBytes / 2);
  void* pinned = backend.AllocateStaging(kBytes);
  if (pinned == nullptr) Check(Error("no pinned memory left"));
  std::vector<char> pageable(kBytes, 1);
  const auto print = [&](const char* name, double seconds) {
    std::printf("%-44s %8.1f GB/s\n", name, kBytes / seconds * 1e-9);
    benchmark.Record(std::string("link ") + name, kBytes / seconds);
  };
  print("upload, pinned",
        benchmark.Seconds(5, [&] { Check(backend.Upload(device.at(0), pinned, kBytes)); }));
  print("upload, pageable", benchmark.Seconds(5, [&] {
    Check(backend.Upload(device.at(0), pageable.data(), kBytes));
  }));
  print("download, pinned",
        benchmark.Seconds(5, [&] { Check(backend.Download(pinned, device.at(0), kBytes)); }));
  print("accumulate bf16 from pinned", benchmark.Seconds(5, [&] {
    Check(backend.Accumulate(acc.floats(), pinned, Dtype::kBF16, kBytes / 2, true));
  }));
  print("round to bf16, pinned (bytes that arrive)", benchmark.Seconds(5, [&] {
    Check(backend.Round(pinned, Dtype::kBF16, acc.floats(), kBytes / 2));
  }));
  print("round to bf16, pageable (bytes that arrive)", benchmark.Seconds(5, [&] {
    Check(backend.Round(pageable.data(), Dtype::kBF16, acc.floats(), kBytes / 2));
  }));
  backend.FreeStaging(pinned);
}

}  // namespace

void MeasureCeilings(Benchmark& benchmark) {
  Backend& backend = benchmark.backend();
  Ceilings& ceilings = benchmark.ceilings();
  std::printf("\n== ceilings\n");
  {
    constexpr std::size_t kBytes = std::size_t{4} << 30;
    const DeviceArray sink(backend, Dtype::kF32, 1);
    DeviceArray from(backend, Dtype::kF32, kBytes / 4), to(backend, Dtype::kF32, kBytes / 4);
    from.FillGaussian(1, 1);
    ceilings.copy =
        2 * kBytes / DeviceSeconds(20, [&] {
          CheckCuda(cudaMemcpyAsync(to.at(0), from.at(0), kBytes, cudaMemcpyDeviceToDevice));
        });
    ceilings.read =
        kBytes / DeviceSeconds(20, [&] {
          CheckCuda(ReadAll(from.at(0), kBytes, static_cast<std::uint32_t*>(sink.at(0)), nullptr));
        });
  }
  std::printf("copy %.0f GB/s (read + written), read %.0f GB/s, bf16 product", ceilings.copy * 1e-9,
              ceilings.read * 1e-9);
  for (const int n : {1024, 2048, 4096, 8192}) {
    ceilings.product = ProductRate(backend, n);
    std::printf(" %d: %.0f", n, ceilings.product * 1e-12);
    benchmark.Record("ceiling product " + std::to_string(n), ceilings.product);
  }
  std::printf(" TFLOP/s\n");
  benchmark.Record("ceiling copy", ceilings.copy);
  benchmark.Record("ceiling read", ceilings.read);
  MeasureLink(benchmark);
}

}  // namespace muond::kernels::cuda
