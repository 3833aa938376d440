#include "nccl/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "nccl/cuda/sum.h"
#include "proto/check.h"
#include "proto/mutex.h"

namespace muond::nccl {
namespace {

absl::Status Check(const char* action, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // reported here, not by the next launch
  const std::string message = absl::StrFormat("GPU: %s: %s", action, cudaGetErrorString(error));
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

std::string UuidText(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

// Calls come from threads that may use another GPU: it is theirs again afterwards.
class Current {
 public:
  explicit Current(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~Current() {
    if (changed_) cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

cudaStream_t Real(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t RealEvent(Event event) { return static_cast<cudaEvent_t>(event); }

class CudaDevice final : public Device {
 public:
  CudaDevice(int device, std::string uuid) : device_(device), uuid_(std::move(uuid)) {}
  ~CudaDevice() override {
    const Current current(device_);
    cudaFree(device_table_);
    cudaFreeHost(host_table_);
    if (copies_ != nullptr) cudaStreamDestroy(copies_);
  }

  absl::Status Open() {
    const Current current(device_);
    return Check("create a stream", cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
  }

  std::string uuid() const override { return uuid_; }
  absl::Status MakeCurrent() override { return Check("make current", cudaSetDevice(device_)); }
  absl::StatusOr<void*> Allocate(std::size_t bytes) override {
    const Current current(device_);
    void* memory = nullptr;
    MUOND_RETURN_IF_ERROR(Check("allocate", cudaMalloc(&memory, bytes)));
    return memory;
  }
  void Free(void* memory) override {
    const Current current(device_);
    cudaFree(memory);
  }
  absl::StatusOr<Stream> NewStream() override {
    const Current current(device_);
    cudaStream_t stream = nullptr;
    MUOND_RETURN_IF_ERROR(
        Check("create a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    return static_cast<Stream>(stream);
  }
  void FreeStream(Stream stream) override {
    const Current current(device_);
    cudaStreamDestroy(Real(stream));
  }
  absl::Status Order(Stream stream, Stream after) override {
    const Current current(device_);
    cudaEvent_t event = nullptr;
    MUOND_RETURN_IF_ERROR(Check("create an event",
                                cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    cudaError_t error = cudaEventRecord(event, Real(after));
    if (error == cudaSuccess) error = cudaStreamWaitEvent(Real(stream), event);
    cudaEventDestroy(event);  // when it is done
    return Check("wait for another stream", error);
  }
  absl::Status Copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    const Current current(device_);
    return Check("copy",
                 cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Real(stream)));
  }
  absl::Status ToHost(void* host, const void* from, std::size_t bytes) override {
    return CopyNow(host, from, bytes, cudaMemcpyDeviceToHost);
  }
  absl::Status FromHost(void* to, const void* host, std::size_t bytes) override {
    return CopyNow(to, host, bytes, cudaMemcpyHostToDevice);
  }

  absl::Status Sum(std::span<const SumJob> jobs, std::span<std::uint64_t> sums,
                   Stream stream) override {
    if (jobs.empty()) return absl::OkStatus();
    const Current current(device_);
    MutexLock lock(mutex_);
    const std::size_t results = jobs.size() * sizeof(std::uint64_t);
    MUOND_RETURN_IF_ERROR(ReserveTable(jobs.size_bytes() + results));
    // The sums first: they need the stricter alignment of no one.
    auto* const host_sums = reinterpret_cast<std::uint64_t*>(host_table_);
    std::memset(host_sums, 0, results);
    std::memcpy(host_table_ + results, jobs.data(), jobs.size_bytes());
    std::uint64_t largest = 0;
    for (const SumJob& job : jobs) largest = std::max(largest, job.elements);
    cudaError_t error = cudaMemcpyAsync(device_table_, host_table_, results + jobs.size_bytes(),
                                        cudaMemcpyHostToDevice, Real(stream));
    if (error == cudaSuccess) {
      error = LaunchSum(reinterpret_cast<const SumJob*>(device_table_ + results),
                        reinterpret_cast<std::uint64_t*>(device_table_),
                        static_cast<int>(jobs.size()), largest, Real(stream));
    }
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(host_sums, device_table_, results, cudaMemcpyDeviceToHost,
                              Real(stream));
    }
    if (error == cudaSuccess) error = cudaStreamSynchronize(Real(stream));
    MUOND_RETURN_IF_ERROR(Check("sum", error));
    std::copy(host_sums, host_sums + jobs.size(), sums.begin());
    return absl::OkStatus();
  }

  absl::StatusOr<Event> Record(Stream stream) override {
    const Current current(device_);
    cudaEvent_t event = nullptr;
    MUOND_RETURN_IF_ERROR(Check("create an event",
                                cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    absl::Status recorded = Check("record", cudaEventRecord(event, Real(stream)));
    if (recorded.ok()) return static_cast<Event>(event);
    cudaEventDestroy(event);
    return recorded;
  }
  absl::StatusOr<bool> Done(Event event) override {
    const Current current(device_);
    const cudaError_t error = cudaEventQuery(RealEvent(event));
    if (error == cudaErrorNotReady) return false;
    MUOND_RETURN_IF_ERROR(Check("wait for an event", error));
    return true;
  }
  void FreeEvent(Event event) override {
    const Current current(device_);
    cudaEventDestroy(RealEvent(event));
  }

 private:
  absl::Status CopyNow(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    const Current current(device_);
    MUOND_RETURN_IF_ERROR(
        Check("copy between host and device", cudaMemcpyAsync(to, from, bytes, kind, copies_)));
    return Check("copy between host and device", cudaStreamSynchronize(copies_));
  }

  absl::Status ReserveTable(std::size_t bytes) MUOND_REQUIRES(mutex_) {
    if (bytes <= table_bytes_) return absl::OkStatus();
    cudaFree(std::exchange(device_table_, nullptr));
    cudaFreeHost(std::exchange(host_table_, nullptr));
    table_bytes_ = 0;
    const std::size_t wanted = std::max<std::size_t>(2 * bytes, 64 * 1024);
    MUOND_RETURN_IF_ERROR(
        Check("allocate", cudaMalloc(reinterpret_cast<void**>(&device_table_), wanted)));
    MUOND_RETURN_IF_ERROR(Check("allocate pinned memory",
                                cudaHostAlloc(reinterpret_cast<void**>(&host_table_), wanted,
                                              cudaHostAllocPortable)));
    table_bytes_ = wanted;
    return absl::OkStatus();
  }

  const int device_;
  const std::string uuid_;
  cudaStream_t copies_ = nullptr;
  Mutex mutex_;
  // Sums and jobs of one call.
  char* host_table_ MUOND_GUARDED_BY(mutex_) = nullptr;
  char* device_table_ MUOND_GUARDED_BY(mutex_) = nullptr;
  std::size_t table_bytes_ MUOND_GUARDED_BY(mutex_) = 0;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(const std::string& uuid) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return absl::FailedPreconditionError(
        absl::StrFormat("GPU \"%s\": %s", uuid, cudaGetErrorString(error)));
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    if (UuidText(properties.uuid) != uuid) continue;
    auto device = std::make_shared<CudaDevice>(i, uuid);
    MUOND_RETURN_IF_ERROR(device->Open());
    return device;
  }
  return absl::NotFoundError(
      absl::StrFormat("GPU \"%s\": this process sees no such GPU (CUDA_VISIBLE_DEVICES?)", uuid));
}

}  // namespace muond::nccl
