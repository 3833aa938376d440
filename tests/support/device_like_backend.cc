#include "tests/support/device_like_backend.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/check.h"
#include "proto/mutex.h"

namespace muond::testing {
namespace {

using kernels::Dtype;
using kernels::Error;

// Set in every pointer that is handed out. Beyond the address space of a process on x86-64 and on
// arm64, and not in the byte that arm64 ignores.
constexpr std::uintptr_t kDeviceBit = std::uintptr_t{1} << 52;

bool OnDevice(const void* pointer) {
  return (reinterpret_cast<std::uintptr_t>(pointer) & kDeviceBit) != 0;
}

template <typename T>
T* Flipped(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) ^ kDeviceBit);
}

// The memory behind a pointer that must be the device's; null is no memory.
template <typename T>
T* Behind(T* pointer) {
  if (pointer == nullptr) return nullptr;
  MUOND_CHECK(OnDevice(pointer), "device memory is asked for");
  return Flipped(pointer);
}

void CheckHost(const void* pointer) { MUOND_CHECK(!OnDevice(pointer), "host memory is asked for"); }

// Staging memory of all backends, in bytes: what one device's tensors come in by, another may read.
struct StagingTable {
  Mutex mutex;
  std::map<const char*, std::size_t> bytes MUOND_GUARDED_BY(mutex);
};
StagingTable& Staging() {
  static StagingTable& table = *new StagingTable;
  return table;
}

class DeviceLikeBackend final : public kernels::Backend {
 public:
  DeviceLikeBackend(std::unique_ptr<Backend> behind, const DeviceLikeOptions& options)
      : behind_(std::move(behind)), options_(options) {}
  ~DeviceLikeBackend() override {
    MUOND_CHECK(allocated_.empty() && staged_ == 0, "all memory was given back");
  }

  std::string_view name() const override { return behind_->name(); }
  std::string description() const override { return behind_->description() + ", device-like"; }
  Dtype iterate_dtype() const override { return options_.iterate; }

  void* Allocate(std::size_t bytes) override {
    MutexLock lock(mutex_);
    if (bytes > options_.memory_bytes - used_) return nullptr;
    void* memory = behind_->Allocate(bytes);
    if (memory == nullptr) return nullptr;
    used_ += bytes;
    allocated_[Flipped(memory)] = bytes;
    return Flipped(memory);
  }
  void Free(void* memory) override {
    if (memory == nullptr) return;
    MutexLock lock(mutex_);
    const auto found = allocated_.find(memory);
    MUOND_CHECK(found != allocated_.end(), "what is freed was allocated here");
    used_ -= found->second;
    allocated_.erase(found);
    behind_->Free(Flipped(memory));
  }
  bool host_memory() const override { return false; }
  void* AllocateStaging(std::size_t bytes) override {
    void* memory = behind_->AllocateStaging(bytes);
    if (memory == nullptr) return nullptr;
    MutexLock lock(Staging().mutex);
    Staging().bytes[static_cast<const char*>(memory)] = bytes;
    ++staged_;
    return memory;
  }
  void FreeStaging(void* memory) override {
    if (memory == nullptr) return;
    MutexLock lock(Staging().mutex);
    MUOND_CHECK(Staging().bytes.erase(static_cast<const char*>(memory)) == 1,
                "it is staging memory");
    --staged_;
    behind_->FreeStaging(memory);
  }
  std::size_t FreeBytes() const override {
    MutexLock lock(mutex_);
    return options_.memory_bytes - used_;
  }

  Error Copy(std::span<const kernels::CopyJob> jobs) override {
    std::vector<kernels::CopyJob> inner(jobs.begin(), jobs.end());
    for (kernels::CopyJob& job : inner) {
      job.dst = Behind(job.dst);
      job.src = Behind(job.src);
    }
    return behind_->Copy(inner);
  }
  Error Upload(void* dst, const void* host, std::size_t bytes) override {
    CheckHost(host);
    return behind_->Upload(Behind(dst), host, bytes);
  }
  Error Download(void* host, const void* src, std::size_t bytes) override {
    CheckHost(host);
    return behind_->Download(host, Behind(src), bytes);
  }
  Error Round(void* host, Dtype dtype, const float* src, std::size_t elements) override {
    CheckHost(host);
    return behind_->Round(host, dtype, Behind(src), elements);
  }
  Error RoundAll(std::span<const kernels::RoundJob> jobs) override {
    for (const kernels::RoundJob& job : jobs) {
      void* const dst = OnDevice(job.dst) ? Flipped(job.dst) : job.dst;
      if (Error error = behind_->Round(dst, job.dtype, Behind(job.src), job.elements)) return error;
    }
    return {};
  }
  Error StoreIterate(void* iterate, const float* src, std::size_t elements, double scale) override {
    Store(Behind(iterate), Behind(src), elements, scale);
    return {};
  }
  Error LoadIterate(float* dst, const void* iterate, std::size_t elements) override {
    Load(Behind(dst), Behind(iterate), elements);
    return {};
  }

  Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                   bool first) override {
    if (data != nullptr && OnDevice(data)) {
      data = Flipped(data);
    } else if (elements > 0) {
      CheckStaging(data, elements * DtypeBytes(dtype));
    }
    return behind_->Accumulate(Behind(acc), data, dtype, elements, first);
  }
  Error Scan(std::span<const kernels::GradientView> gradients,
             std::span<kernels::GradientScan> results) override {
    std::vector<kernels::GradientView> inner(gradients.begin(), gradients.end());
    for (kernels::GradientView& gradient : inner) gradient.data = Behind(gradient.data);
    return behind_->Scan(inner, results);
  }
  Error ScanState(std::span<const kernels::StateView> tensors,
                  std::span<kernels::StateScan> results) override {
    std::vector<kernels::StateView> inner(tensors.begin(), tensors.end());
    for (kernels::StateView& tensor : inner) tensor.data = Behind(tensor.data);
    return behind_->ScanState(inner, results);
  }

  Error Momentum(std::span<const kernels::MomentumJob> jobs,
                 std::span<kernels::StateScan> states) override {
    std::vector<kernels::MomentumJob> inner(jobs.begin(), jobs.end());
    std::vector<std::vector<float>> u(jobs.size());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      u[i].resize(jobs[i].gradient.elements);
      inner[i].gradient.data = Behind(jobs[i].gradient.data);
      inner[i].m = Behind(jobs[i].m);
      inner[i].u = u[i].data();
    }
    if (Error error = behind_->Momentum(inner, states)) return error;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      Store(Behind(jobs[i].u), u[i].data(), u[i].size(), 1);
    }
    return {};
  }
  Error NewtonSchulz(std::span<const kernels::MatrixJob> jobs,
                     const kernels::NewtonSchulzRule& rule,
                     std::span<kernels::NewtonSchulzResult> results) override {
    if (options_.refuses && options_.refuses(rule)) return Error("no scratch left");
    std::vector<kernels::MatrixJob> inner(jobs.begin(), jobs.end());
    std::vector<std::vector<float>> u(jobs.size()), o(jobs.size());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      u[i].resize(static_cast<std::size_t>(jobs[i].rows * jobs[i].cols));
      o[i].resize(u[i].size());
      Load(u[i].data(), Behind(jobs[i].u), u[i].size());
      inner[i].u = u[i].data();
      inner[i].o = o[i].data();
    }
    if (Error error = behind_->NewtonSchulz(inner, rule, results)) return error;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      // A power of two changes no bit of what is applied, unless it is forgotten there.
      Store(Behind(jobs[i].o), o[i].data(), o[i].size(), 2);
      results[i].o_scale *= 0.5;
    }
    return {};
  }
  Error Apply(std::span<const kernels::ApplyJob> jobs,
              std::span<kernels::StateScan> states) override {
    std::vector<kernels::ApplyJob> inner(jobs.begin(), jobs.end());
    std::vector<std::vector<float>> o(jobs.size());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      o[i].resize(jobs[i].elements);
      Load(o[i].data(), Behind(jobs[i].o), jobs[i].elements);
      inner[i].w = Behind(jobs[i].w);
      inner[i].o = o[i].data();
      inner[i].rounded.data = Behind(jobs[i].rounded.data);
    }
    return behind_->Apply(inner, states);
  }
  Error AdamW(std::span<const kernels::AdamWJob> jobs,
              std::span<kernels::AdamWScan> scans) override {
    std::vector<kernels::AdamWJob> inner(jobs.begin(), jobs.end());
    for (kernels::AdamWJob& job : inner) {
      job.gradient.data = Behind(job.gradient.data);
      job.state = {Behind(job.state.w), Behind(job.state.exp_avg), Behind(job.state.exp_avg_sq)};
      job.rounded.data = Behind(job.rounded.data);
    }
    return behind_->AdamW(inner, scans);
  }
  std::size_t NewtonSchulzScratchBytes(std::span<const kernels::MatrixShape> shapes,
                                       const kernels::NewtonSchulzRule& rule) const override {
    return behind_->NewtonSchulzScratchBytes(shapes, rule);
  }

 private:
  // To and from the iterate dtype, of memory that the host can touch.
  void Store(void* iterate, const float* values, std::size_t elements, double scale) const {
    for (std::size_t i = 0; i < elements; ++i) {
      const auto value = static_cast<float>(values[i] * scale);
      if (options_.iterate == Dtype::kF32) {
        static_cast<float*>(iterate)[i] = value;
      } else {
        static_cast<std::uint16_t*>(iterate)[i] = options_.iterate == Dtype::kF16
                                                      ? kernels::FloatToF16(value)
                                                      : kernels::FloatToBF16(value);
      }
    }
  }
  void Load(float* values, const void* iterate, std::size_t elements) const {
    for (std::size_t i = 0; i < elements; ++i) {
      if (options_.iterate == Dtype::kF32) {
        values[i] = static_cast<const float*>(iterate)[i];
      } else {
        const std::uint16_t bits = static_cast<const std::uint16_t*>(iterate)[i];
        values[i] = options_.iterate == Dtype::kF16 ? kernels::F16ToFloat(bits)
                                                    : kernels::BF16ToFloat(bits);
      }
    }
  }

  static void CheckStaging(const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const char*>(data);
    MutexLock lock(Staging().mutex);
    auto found = Staging().bytes.upper_bound(begin);
    MUOND_CHECK(found != Staging().bytes.begin(), "it is staging memory");
    --found;
    MUOND_CHECK(begin + bytes <= found->first + found->second, "it lies in one staging buffer");
  }

  const std::unique_ptr<Backend> behind_;
  const DeviceLikeOptions options_;
  mutable Mutex mutex_;
  std::size_t used_ MUOND_GUARDED_BY(mutex_) = 0;
  std::map<void*, std::size_t> allocated_ MUOND_GUARDED_BY(mutex_);  // device memory, in bytes
  std::atomic<int> staged_{0};  // staging buffers
};

class DeviceLikeMemory final : public kernels::DeviceMemory {
 public:
  explicit DeviceLikeMemory(std::string uuid) : behind_(kernels::MakeHostDeviceMemory(uuid)) {}

  std::string_view uuid() const override { return behind_->uuid(); }
  Error AllocateShared(std::size_t bytes, kernels::SharedBlock* block) override {
    Error error = behind_->AllocateShared(bytes, block);
    if (!error) block->data = Flipped(block->data);
    return error;
  }
  void FreeShared(void* data) override { behind_->FreeShared(Behind(data)); }
  Error MoveAll(std::span<const kernels::MoveJob> jobs, std::span<std::uint64_t> sums) override {
    std::vector<kernels::MoveJob> inner(jobs.begin(), jobs.end());
    for (kernels::MoveJob& job : inner) {
      if (OnDevice(job.dst)) job.dst = Flipped(job.dst);
      job.src = Behind(job.src);
    }
    return behind_->MoveAll(inner, sums);
  }
  Error Write(void* dst, const void* host, std::size_t bytes) override {
    CheckHost(host);
    return behind_->Write(Behind(dst), host, bytes);
  }
  Error Read(void* host, const void* src, std::size_t bytes) override {
    CheckHost(host);
    return behind_->Read(host, Behind(src), bytes);
  }
  bool Reaches(const void* data, std::size_t) const override { return OnDevice(data); }

 private:
  const std::unique_ptr<kernels::DeviceMemory> behind_;
};

}  // namespace

std::unique_ptr<kernels::DeviceMemory> MakeDeviceLikeMemory(std::string uuid) {
  return std::make_unique<DeviceLikeMemory>(std::move(uuid));
}

std::unique_ptr<kernels::Backend> MakeDeviceLikeBackend(std::unique_ptr<kernels::Backend> behind,
                                                        const DeviceLikeOptions& options) {
  return std::make_unique<DeviceLikeBackend>(std::move(behind), options);
}

}  // namespace muond::testing
