// The backend's methods on one device: current device, memory, moving, and who does the rest.
#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kernels/cuda/devices.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/elementwise_runner.h"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/iterate_dtype.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/newton_schulz.h"

namespace muond::kernels {
namespace {

// Half of the pinned memory through which pageable host memory goes when a kernel is involved.
constexpr std::size_t kBounceBytes = 8 << 20;

// The stream and the events, destroyed with the backend.
struct Streams {
  cudaStream_t stream = nullptr;
  cudaEvent_t bounced[2] = {};

  cudaError_t Create() {
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (cudaEvent_t& event : bounced) {
      if (error != cudaSuccess) break;
      error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
    return error;
  }
  ~Streams() {
    for (cudaEvent_t event : bounced) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

std::string Count(std::size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaDevice& device, const BackendOptions& options,
              std::unique_ptr<Streams> streams)
      : device_(device),
        streams_(std::move(streams)),
        elementwise_(streams_->stream),
        newton_schulz_(options.newton_schulz_fault) {}

  ~CudaBackend() override { cudaSetDevice(device_.ordinal); }  // for the members' destructors

  std::string_view name() const override { return "cuda"; }
  std::string description() const override {
    int driver = 0;
    int processors = 0;
    cudaDriverGetVersion(&driver);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_.ordinal);
    const auto version = [](int v) {
      return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
    };
    return "cuda: device " + std::to_string(device_.ordinal) + ", " + device_.name + " (" +
           device_.uuid + "), compute capability " + std::to_string(device_.capability_major) +
           "." + std::to_string(device_.capability_minor) + ", " + std::to_string(processors) +
           " multiprocessors, " + std::to_string(device_.memory_bytes >> 20) + " MiB, CUDA " +
           version(CUDART_VERSION) + ", driver for CUDA " + version(driver);
  }
  Dtype iterate_dtype() const override { return cuda::kIterateDtype; }

  void* Allocate(std::size_t bytes) override {
    cudaSetDevice(device_.ordinal);
    void* memory = nullptr;
    if (cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)) != cudaSuccess) {
      return NoMemory();
    }
    // The thread's own stream: other threads allocate, and the backend computes, undisturbed.
    if (cudaMemsetAsync(memory, 0, bytes, cudaStreamPerThread) == cudaSuccess &&
        cudaStreamSynchronize(cudaStreamPerThread) == cudaSuccess) {
      return memory;
    }
    cudaFree(memory);
    return NoMemory();
  }
  void Free(void* memory) override {
    cudaSetDevice(device_.ordinal);
    cudaFree(memory);
  }
  bool host_memory() const override { return false; }
  void* AllocateStaging(std::size_t bytes) override {
    cudaSetDevice(device_.ordinal);
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, std::max<std::size_t>(bytes, 1), cudaHostAllocPortable) !=
        cudaSuccess) {
      return NoMemory();
    }
    return memory;
  }
  void FreeStaging(void* memory) override {
    cudaSetDevice(device_.ordinal);
    cudaFreeHost(memory);
  }
  std::size_t FreeBytes() const override {
    cudaSetDevice(device_.ordinal);
    std::size_t free = 0;
    std::size_t total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess ? free : 0;
  }

  Error Copy(std::span<const CopyJob> jobs) override {
    Use();
    return Report(elementwise_.Copy(jobs), "copy of", jobs.size());
  }
  // The driver moves pinned memory at the link's rate and stages pageable memory itself.
  Error Upload(void* dst, const void* host, std::size_t bytes) override {
    return Move(dst, host, bytes, cudaMemcpyHostToDevice, "upload");
  }
  Error Download(void* host, const void* src, std::size_t bytes) override {
    return Move(host, src, bytes, cudaMemcpyDeviceToHost, "download");
  }
  Error Round(void* host, Dtype dtype, const float* src, std::size_t elements) override {
    if (dtype == Dtype::kF32) return Download(host, src, elements * sizeof(float));
    Use();
    return Report(RoundToHost(static_cast<char*>(host), dtype, src, elements), "rounding",
                  Count(elements, "element"));
  }
  Error RoundAll(std::span<const RoundJob> jobs) override {
    Use();
    return Report(elementwise_.Round(jobs), "rounding of", jobs.size());
  }
  Error StoreIterate(void* iterate, const float* src, std::size_t elements, double scale) override {
    Use();
    return Report(Finish(cuda::ToIterate(iterate, src, elements, scale, stream())),
                  "storing an iterate of", Count(elements, "element"));
  }
  Error LoadIterate(float* dst, const void* iterate, std::size_t elements) override {
    Use();
    return Report(Finish(cuda::FromIterate(dst, iterate, elements, stream())),
                  "loading an iterate of", Count(elements, "element"));
  }

  Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                   bool first) override {
    Use();
    return Report(AddFrom(acc, static_cast<const char*>(data), dtype, elements, first),
                  "accumulation of", Count(elements, "element"));
  }
  Error Scan(std::span<const GradientView> gradients, std::span<GradientScan> results) override {
    Use();
    return Report(elementwise_.Scan(gradients, results), "scan of", gradients.size());
  }
  Error ScanState(std::span<const StateView> tensors, std::span<StateScan> results) override {
    Use();
    return Report(elementwise_.ScanState(tensors, results), "scan of", tensors.size());
  }
  Error Momentum(std::span<const MomentumJob> jobs, std::span<StateScan> states) override {
    Use();
    return Report(elementwise_.Momentum(jobs, states), "momentum of", jobs.size());
  }
  Error NewtonSchulz(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                     std::span<NewtonSchulzResult> results) override {
    Use();
    Error error = newton_schulz_.Run(jobs, rule, results, stream());
    return error && cuda::DeviceLost() ? Lost(std::move(error)) : error;
  }
  Error Apply(std::span<const ApplyJob> jobs, std::span<StateScan> states) override {
    Use();
    return Report(elementwise_.Apply(jobs, states), "update of", jobs.size());
  }
  Error AdamW(std::span<const AdamWJob> jobs, std::span<AdamWScan> scans) override {
    Use();
    return Report(elementwise_.AdamW(jobs, scans), "adamw of", jobs.size());
  }
  std::size_t NewtonSchulzScratchBytes(std::span<const MatrixShape> shapes,
                                       const NewtonSchulzRule& rule) const override {
    return newton_schulz_.ScratchBytes(shapes, rule);
  }
  Error Trap() override {
    Use();
    return Report(cuda::Trap(stream()), "injected fault in", "a kernel");
  }

 private:
  cudaStream_t stream() const { return streams_->stream; }
  // Null says it, the next launch must not; a device that is lost is another matter.
  void* NoMemory() const {
    if (cuda::DeviceLost()) {
      const cudaError_t left = cudaStreamQuery(cudaStreamPerThread);
      static_cast<void>(Report(left, "allocation", "of memory"));
    }
    cudaGetLastError();
    return nullptr;
  }
  // The current device belongs to the thread, and any thread may call.
  void Use() const { cudaSetDevice(device_.ordinal); }

  Error Report(cudaError_t error, const char* action, const std::string& object) const {
    if (error == cudaSuccess) return {};
    Error said("cuda device " + std::to_string(device_.ordinal) + " (" + device_.name +
               "): " + action + " " + object + ": " + cudaGetErrorString(error) + " (" +
               cudaGetErrorName(error) + ")");
    return cuda::DeviceLost() ? Lost(std::move(said)) : said;
  }
  Error Report(cudaError_t error, const char* action, std::size_t tensors) const {
    return error == cudaSuccess ? Error() : Report(error, action, Count(tensors, "tensor"));
  }
  cudaError_t Finish(cudaError_t launched) const {
    return launched == cudaSuccess ? cudaStreamSynchronize(stream()) : launched;
  }

  Error Move(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind,
             const char* action) const {
    if (bytes == 0) return {};
    Use();
    return Report(Finish(cudaMemcpyAsync(dst, src, bytes, kind, stream())), action,
                  "of " + Count(bytes, "byte"));
  }

  // Whether kernels may use this address: device memory and pinned host memory.
  static bool DeviceSees(const void* address) {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    return attributes.type != cudaMemoryTypeUnregistered;
  }

  // step(i, half, begin, count) for each part that fits into half of the bounce memory.
  template <typename Step>
  cudaError_t InParts(std::size_t elements, std::size_t element_bytes, const Step& step) {
    if (const cudaError_t error = bounce_.Reserve(2 * kBounceBytes); error != cudaSuccess) {
      return error;
    }
    const std::size_t part = kBounceBytes / element_bytes;
    for (std::size_t i = 0; i * part < elements; ++i) {
      const cudaError_t error = step(i, bounce_.get<char>() + i % 2 * kBounceBytes, i * part,
                                     std::min(part, elements - i * part));
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  // A kernel writes pinned memory itself; parts of pageable memory are copied while the next one
  // is being written.
  cudaError_t RoundToHost(char* host, Dtype dtype, const float* src, std::size_t elements) {
    if (elements == 0) return cudaSuccess;
    if (DeviceSees(host)) return Finish(cuda::RoundTo(host, dtype, src, elements, stream()));
    const std::size_t size = DtypeBytes(dtype);
    struct {
      char* dst = nullptr;
      const char* half = nullptr;
      std::size_t bytes = 0;
    } last;
    const auto fetch_last = [&](std::size_t next) {
      if (last.dst == nullptr) return cudaSuccess;
      const cudaError_t error = cudaEventSynchronize(streams_->bounced[(next + 1) % 2]);
      if (error == cudaSuccess) std::memcpy(last.dst, last.half, last.bytes);
      return error;
    };
    std::size_t parts = 0;
    const cudaError_t error = InParts(
        elements, size, [&](std::size_t i, char* half, std::size_t begin, std::size_t count) {
          cudaError_t result = cuda::RoundTo(half, dtype, src + begin, count, stream());
          if (result == cudaSuccess) {
            result = cudaEventRecord(streams_->bounced[i % 2], stream());
          }
          if (result == cudaSuccess) result = fetch_last(i);
          last = {host + begin * size, half, count * size};
          parts = i + 1;
          return result;
        });
    return error == cudaSuccess ? fetch_last(parts) : error;
  }

  cudaError_t AddFrom(float* acc, const char* data, Dtype dtype, std::size_t elements, bool first) {
    if (elements == 0) return cudaSuccess;
    if (DeviceSees(data)) {
      return Finish(cuda::AddTo(acc, data, dtype, elements, first, stream()));
    }
    const std::size_t size = DtypeBytes(dtype);
    const cudaError_t error = InParts(
        elements, size, [&](std::size_t i, char* half, std::size_t begin, std::size_t count) {
          cudaError_t result = cudaEventSynchronize(streams_->bounced[i % 2]);
          if (result != cudaSuccess) return result;
          std::memcpy(half, data + begin * size, count * size);
          result = cuda::AddTo(acc + begin, half, dtype, count, first, stream());
          if (result != cudaSuccess) return result;
          return cudaEventRecord(streams_->bounced[i % 2], stream());
        });
    return Finish(error);
  }

  const CudaDevice device_;
  std::unique_ptr<Streams> streams_;
  cuda::ElementwiseRunner elementwise_;
  cuda::NewtonSchulz newton_schulz_;
  cuda::GrowingBuffer bounce_{cuda::MemoryKind::kPinned};
};

Error Refusal(int device, const std::string& cause) {
  return Error("cuda device " + std::to_string(device) + ": " + cause);
}

}  // namespace

std::unique_ptr<Backend> MakeCudaBackend(int device, const BackendOptions& options, Error& error) {
  const CudaDevices list = ListCudaDevices();
  const auto found = std::find_if(list.devices.begin(), list.devices.end(),
                                  [&](const CudaDevice& d) { return d.ordinal == device; });
  if (list.devices.empty()) {
    error = Refusal(device, list.why_none);
    return nullptr;
  }
  if (found == list.devices.end()) {
    error = Refusal(
        device, "there is no such device; " + Count(list.devices.size(), "device") + " visible");
    return nullptr;
  }
  if (!found->usable) {
    error = Refusal(device, found->name + " has compute capability " +
                                std::to_string(found->capability_major) + "." +
                                std::to_string(found->capability_minor) + ", 8.0 is needed");
    return nullptr;
  }
  auto streams = std::make_unique<Streams>();
  cudaError_t status = cudaSetDevice(device);
  if (status == cudaSuccess) status = streams->Create();
  if (status != cudaSuccess) {
    cudaGetLastError();
    error = Refusal(device, found->name + ": cannot be used: " + cudaGetErrorString(status));
    return nullptr;
  }
  error = Error();
  return std::make_unique<CudaBackend>(*found, options, std::move(streams));
}

}  // namespace muond::kernels
