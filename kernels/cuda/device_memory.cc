#include "kernels/cuda/device_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/cuda/devices.h"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/move.h"
#include "proto/mutex.h"

namespace muond::kernels {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == kSharedHandleBytes, "the handle that trainers expect");

bool QuadsFit(const void* address, std::uint32_t element_bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % (4 * element_bytes) == 0;
}

class CudaDeviceMemory final : public DeviceMemory {
 public:
  explicit CudaDeviceMemory(CudaDevice device) : device_(std::move(device)) {}
  ~CudaDeviceMemory() override {
    cudaSetDevice(device_.ordinal);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  cudaError_t Create(const CudaDevices& list) {
    cudaSetDevice(device_.ordinal);
    for (const CudaDevice& other : list.devices) {
      if (other.ordinal == device_.ordinal) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(other.ordinal, 0);
      const bool reached = error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
      shared_with_peers_ = shared_with_peers_ && reached;
      cudaGetLastError();
    }
    return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  }

  std::string_view uuid() const override { return device_.uuid; }

  Error AllocateShared(std::size_t bytes, SharedBlock* block) override {
    cudaSetDevice(device_.ordinal);
    void* data = nullptr;
    cudaError_t error = cudaMalloc(&data, bytes);
    if (error != cudaSuccess) return Report(error, "allocate memory to share");
    cudaIpcMemHandle_t handle;
    error = cudaMemsetAsync(data, 0, bytes, cudaStreamPerThread);
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamPerThread);
    if (error == cudaSuccess) error = cudaIpcGetMemHandle(&handle, data);
    if (error != cudaSuccess) {
      cudaFree(data);
      return Report(error, "share memory");
    }
    *block = {data, std::string(reinterpret_cast<const char*>(&handle), sizeof(handle))};
    return {};
  }
  void FreeShared(void* data) override {
    cudaSetDevice(device_.ordinal);
    cudaFree(data);  // waits for what still runs
  }

  Error MoveAll(std::span<const MoveJob> jobs, std::span<std::uint64_t> sums) override {
    if (jobs.empty()) return {};
    MutexLock lock(mutex_);
    cudaSetDevice(device_.ordinal);
    return Report(Move(jobs, sums), "move slices");
  }
  Error Write(void* dst, const void* host, std::size_t bytes) override {
    if (bytes == 0) return {};
    cudaSetDevice(device_.ordinal);
    cudaError_t error = cudaMemcpyAsync(dst, host, bytes, cudaMemcpyDefault, cudaStreamPerThread);
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamPerThread);
    return Report(error, "write from the host");
  }
  Error Read(void* host, const void* src, std::size_t bytes) override {
    return Write(host, src, bytes);
  }
  bool shared_with_peers() const override { return shared_with_peers_; }
  bool Reaches(const void* data, std::size_t bytes) const override {
    cudaSetDevice(device_.ordinal);
    const auto* first = static_cast<const char*>(data);
    return Sees(first) && (bytes == 0 || Sees(first + bytes - 1));
  }

 private:
  bool Sees(const void* address) const {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (attributes.type == cudaMemoryTypeDevice) return attributes.device == device_.ordinal;
    return attributes.type != cudaMemoryTypeUnregistered;
  }

  Error Report(cudaError_t error, const char* action) const {
    if (error == cudaSuccess) return {};
    Error said("cuda device " + std::to_string(device_.ordinal) + " (" + device_.name + "): " +
               action + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
    return cuda::DeviceLost() ? Lost(std::move(said)) : said;
  }

  cudaError_t Move(std::span<const MoveJob> jobs, std::span<std::uint64_t> sums)
      MUOND_REQUIRES(mutex_) {
    const std::size_t jobs_bytes = jobs.size() * sizeof(cuda::MovePassJob);
    const std::size_t bytes = jobs_bytes + (jobs.size() + 1) * sizeof(std::uint32_t);
    const std::size_t sum_bytes = sums.size() * sizeof(unsigned long long);
    cudaError_t error = host_.Reserve(std::max(bytes, sum_bytes));
    if (error == cudaSuccess) error = table_.Reserve(bytes);
    if (error == cudaSuccess) error = sums_.Reserve(sum_bytes);
    if (error != cudaSuccess) return error;
    auto* out = host_.get<cuda::MovePassJob>();
    auto* first_chunk = reinterpret_cast<std::uint32_t*>(host_.get<char>() + jobs_bytes);
    std::size_t chunks = 0;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const MoveJob& job = jobs[i];
      out[i] = {.dst = job.dst,
                .src = job.src,
                .elements = job.elements,
                .first = job.first,
                .element_bytes = job.element_bytes,
                .sum = job.sum,
                .aligned = QuadsFit(job.dst, job.element_bytes) &&
                           QuadsFit(job.src, job.element_bytes)};
      first_chunk[i] = static_cast<std::uint32_t>(chunks);
      chunks += (job.elements + cuda::kChunkElements - 1) / cuda::kChunkElements;
      if (chunks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidValue;
    }
    first_chunk[jobs.size()] = static_cast<std::uint32_t>(chunks);
    return Launch(static_cast<std::uint32_t>(jobs.size()), static_cast<std::uint32_t>(chunks),
                  jobs_bytes, bytes, sums);
  }

  cudaError_t Launch(std::uint32_t count, std::uint32_t chunks, std::size_t jobs_bytes,
                     std::size_t bytes, std::span<std::uint64_t> sums) MUOND_REQUIRES(mutex_) {
    const char* device = table_.get<char>();
    const cuda::JobTable<cuda::MovePassJob> table{
        reinterpret_cast<const cuda::MovePassJob*>(device),
        reinterpret_cast<const std::uint32_t*>(device + jobs_bytes), count, chunks};
    auto* on_device = sums_.get<unsigned long long>();
    const std::size_t sum_bytes = sums.size() * sizeof(unsigned long long);
    cudaError_t error = cudaMemcpyAsync(table_.get<void>(), host_.get<void>(), bytes,
                                        cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = cudaMemsetAsync(on_device, 0, sum_bytes, stream_);
    if (error == cudaSuccess) error = cuda::MoveAll(table, on_device, stream_);
    // Behind the table's way to the device, so its memory here can serve again.
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(host_.get<void>(), on_device, sum_bytes, cudaMemcpyDeviceToHost,
                              stream_);
    }
    const cudaError_t waited = cudaStreamSynchronize(stream_);
    if (error == cudaSuccess) error = waited;
    if (error != cudaSuccess) return error;
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += host_.get<unsigned long long>()[i];
    return cudaSuccess;
  }

  const CudaDevice device_;
  bool shared_with_peers_ = true;
  Mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cuda::GrowingBuffer host_ MUOND_GUARDED_BY(mutex_){cuda::MemoryKind::kPinned};
  cuda::GrowingBuffer table_ MUOND_GUARDED_BY(mutex_){cuda::MemoryKind::kDevice};
  cuda::GrowingBuffer sums_ MUOND_GUARDED_BY(mutex_){cuda::MemoryKind::kDevice};
};

}  // namespace

std::unique_ptr<DeviceMemory> MakeCudaDeviceMemory(int device, Error& error) {
  const CudaDevices list = ListCudaDevices();
  for (const CudaDevice& found : list.devices) {
    if (found.ordinal != device) continue;
    auto memory = std::make_unique<CudaDeviceMemory>(found);
    const cudaError_t status = memory->Create(list);
    if (status == cudaSuccess) return memory;
    cudaGetLastError();
    error = Error("cuda device " + std::to_string(device) + ": " + cudaGetErrorString(status));
    return nullptr;
  }
  error = Error("cuda device " + std::to_string(device) + ": " +
                (list.devices.empty() ? list.why_none : "there is no such device"));
  return nullptr;
}

}  // namespace muond::kernels
