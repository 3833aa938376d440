// The machine's GPU driver, without its headers: the few functions that a client needs have been
// there, as they are declared here, since CUDA 11.4.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/cpp/gpu.h"
#include "client/cpp/gpu_copy.h"
#include "proto/check.h"
#include "proto/mutex.h"

namespace muond::client {
namespace {

using Result = int;  // CUresult
using Device = int;
using Context = void*;
using Address = unsigned long long;  // CUdeviceptr
struct Handle {
  char bytes[kGpuHandleBytes];
};
struct DeviceUuid {
  unsigned char bytes[16];
};

constexpr Result kSuccess = 0;
constexpr unsigned kOpenLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr unsigned kPortable = 1;            // CU_MEMHOSTALLOC_PORTABLE
constexpr std::size_t kCopyBlocksMax = 264;  // of a piece: two for each multiprocessor of an H200

// The driver has addresses as numbers.
void* PointerOf(Address address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// The entry points, by the names that the library exports them under.
struct Functions {
  Result (*Init)(unsigned);
  Result (*GetErrorString)(Result, const char**);
  Result (*DeviceGet)(Device*, int);
  Result (*DeviceGetUuid)(DeviceUuid*, Device);
  Result (*PrimaryRetain)(Context*, Device);
  Result (*PrimaryRelease)(Device);
  Result (*Push)(Context);
  Result (*Pop)(Context*);
  Result (*IpcOpen)(Address*, Handle, unsigned);
  Result (*IpcClose)(Address);
  Result (*CopyAsync)(Address, Address, std::size_t, void*);
  Result (*StreamSynchronize)(void*);
  Result (*HostAlloc)(void**, std::size_t, unsigned);
  Result (*HostFree)(void*);
  Result (*MemAlloc)(Address*, std::size_t);
  Result (*MemFree)(Address);
  Result (*ModuleLoad)(void**, const void*);
  Result (*ModuleGetFunction)(void**, void*, const char*);
  Result (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**);
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

absl::StatusOr<Functions> FindAll(void* library) {
  Functions f{};
  const bool all = Find(library, "cuInit", &f.Init) &&
                   Find(library, "cuGetErrorString", &f.GetErrorString) &&
                   Find(library, "cuDeviceGet", &f.DeviceGet) &&
                   Find(library, "cuDeviceGetUuid_v2", &f.DeviceGetUuid) &&
                   Find(library, "cuDevicePrimaryCtxRetain", &f.PrimaryRetain) &&
                   Find(library, "cuDevicePrimaryCtxRelease_v2", &f.PrimaryRelease) &&
                   Find(library, "cuCtxPushCurrent_v2", &f.Push) &&
                   Find(library, "cuCtxPopCurrent_v2", &f.Pop) &&
                   Find(library, "cuIpcOpenMemHandle_v2", &f.IpcOpen) &&
                   Find(library, "cuIpcCloseMemHandle", &f.IpcClose) &&
                   Find(library, "cuMemcpyAsync", &f.CopyAsync) &&
                   Find(library, "cuStreamSynchronize", &f.StreamSynchronize) &&
                   Find(library, "cuMemHostAlloc", &f.HostAlloc) &&
                   Find(library, "cuMemFreeHost", &f.HostFree) &&
                   Find(library, "cuMemAlloc_v2", &f.MemAlloc) &&
                   Find(library, "cuMemFree_v2", &f.MemFree) &&
                   Find(library, "cuModuleLoadData", &f.ModuleLoad) &&
                   Find(library, "cuModuleGetFunction", &f.ModuleGetFunction) &&
                   Find(library, "cuLaunchKernel", &f.Launch);
  if (all) return f;
  return absl::UnavailableError("GPU driver: libcuda.so.1 is older than CUDA 11.4");
}

class MachineDriver final : public GpuDriver {
 public:
  explicit MachineDriver(const Functions& functions) : f_(functions) {}

  absl::StatusOr<std::string> Uuid(int device) override {
    Device found = 0;
    DeviceUuid uuid;
    if (f_.DeviceGet(&found, device) != kSuccess || f_.DeviceGetUuid(&uuid, found) != kSuccess) {
      return absl::NotFoundError(absl::StrFormat(
          "GPU %d: this process sees no device with that ordinal", device));
    }
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
      if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
      text += absl::StrFormat("%02x", uuid.bytes[i]);
    }
    return text;
  }

  absl::StatusOr<void*> Open(int device, const std::string& handle) override {
    if (handle.size() != kGpuHandleBytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("GPU %d: memory handle: expected %d bytes, got %d", device,
                          kGpuHandleBytes, handle.size()));
    }
    Handle copy;
    std::memcpy(copy.bytes, handle.data(), kGpuHandleBytes);
    Address address = 0;
    MUOND_RETURN_IF_ERROR(Run(device, "open a memory handle of another process", [&] {
      return f_.IpcOpen(&address, copy, kOpenLazyPeerAccess);
    }));
    return PointerOf(address);
  }
  void Close(int device, void* mapped) override {
    Run(device, "close memory", [&] {
      return f_.IpcClose(reinterpret_cast<Address>(mapped));
    }).IgnoreError();
  }

  absl::Status Copy(const GpuPlace& place, void* to, const void* from,
                    std::size_t bytes) override {
    return Run(place.device, "copy", [&] {
      return f_.CopyAsync(reinterpret_cast<Address>(to), reinterpret_cast<Address>(from), bytes,
                          place.stream);
    });
  }
  absl::Status CopyAll(const GpuPlace& place, std::span<const CopyJob> jobs) override {
    const absl::StatusOr<void*> program = jobs.size() > 1 ? Program(place.device) : nullptr;
    if (jobs.size() <= 1 || !program.ok()) return GpuDriver::CopyAll(place, jobs);
    for (; !jobs.empty(); jobs = jobs.subspan(std::min(jobs.size(), GpuCopies::kMost))) {
      GpuCopies copies;
      unsigned count = 0;
      std::size_t largest = 0;
      for (const CopyJob& job : jobs.first(std::min(jobs.size(), GpuCopies::kMost))) {
        copies.pieces[count++] = {reinterpret_cast<Address>(job.to),
                                  reinterpret_cast<Address>(job.from), job.bytes};
        largest = std::max(largest, job.bytes);
      }
      // Of the largest piece a thread copies four times 16 bytes or more; more blocks than a device
      // can hold at once gain nothing.
      const auto blocks = static_cast<unsigned>(
          std::clamp<std::size_t>(largest / (64 * kGpuCopyThreads), 1, kCopyBlocksMax));
      void* arguments[] = {&copies};
      MUOND_RETURN_IF_ERROR(Run(place.device, "copy slices", [&] {
        return f_.Launch(*program, blocks, count, 1, kGpuCopyThreads, 1, 1, 0, place.stream,
                         arguments, nullptr);
      }));
    }
    return absl::OkStatus();
  }
  std::string WhyOneByOne(int device) override {
    return std::string(Program(device).status().message());
  }
  absl::Status Wait(const GpuPlace& place) override {
    return Run(place.device, "wait for a stream",
               [&] { return f_.StreamSynchronize(place.stream); });
  }

  void* Allocate(int device, std::size_t bytes) override {
    Address address = 0;
    const absl::Status status =
        Run(device, "allocate memory", [&] { return f_.MemAlloc(&address, bytes); });
    return status.ok() ? PointerOf(address) : nullptr;
  }
  void Free(int device, void* memory) override {
    Run(device, "free memory", [&] {
      return f_.MemFree(reinterpret_cast<Address>(memory));
    }).IgnoreError();
  }
  void* AllocatePinned(int device, std::size_t bytes) override {
    void* memory = nullptr;
    const absl::Status status = Run(device, "allocate pinned memory", [&] {
      return f_.HostAlloc(&memory, bytes, kPortable);
    });
    return status.ok() ? memory : nullptr;
  }
  void FreePinned(int device, void* memory) override {
    Run(device, "free pinned memory", [&] { return f_.HostFree(memory); }).IgnoreError();
  }

 private:
  // The device's primary context, which stays for as long as the process uses it.
  absl::StatusOr<Context> ContextOf(int device) {
    MutexLock lock(mutex_);
    if (const auto found = contexts_.find(device); found != contexts_.end()) return found->second;
    Device handle = 0;
    Context context = nullptr;
    Result result = f_.DeviceGet(&handle, device);
    if (result == kSuccess) result = f_.PrimaryRetain(&context, handle);
    MUOND_RETURN_IF_ERROR(Report(device, "use", result));
    contexts_[device] = context;
    return context;
  }

  // The copying program, translated for the device at the first call.
  absl::StatusOr<void*> Program(int device) {
    MutexLock lock(programs_mutex_);
    if (const auto found = programs_.find(device); found != programs_.end()) return found->second;
    void *module = nullptr, *function = nullptr;
    const absl::Status status = Run(device, "translate a program", [&] {
      const Result loaded = f_.ModuleLoad(&module, kGpuCopyProgram);
      return loaded == kSuccess ? f_.ModuleGetFunction(&function, module, kGpuCopyName) : loaded;
    });
    MUOND_RETURN_IF_ERROR(status);  // what stands in the way may pass
    return programs_.emplace(device, function).first->second;
  }

  // The thread's own current context is what it was afterwards.
  template <typename Call>
  absl::Status Run(int device, const char* action, const Call& call) {
    MUOND_ASSIGN_OR_RETURN(Context context, ContextOf(device));
    MUOND_RETURN_IF_ERROR(Report(device, action, f_.Push(context)));
    const Result result = call();
    Context popped = nullptr;
    f_.Pop(&popped);
    return Report(device, action, result);
  }

  absl::Status Report(int device, const char* action, Result result) const {
    if (result == kSuccess) return absl::OkStatus();
    const char* text = nullptr;
    f_.GetErrorString(result, &text);
    return absl::FailedPreconditionError(
        absl::StrFormat("GPU %d: %s: %s (CUDA error %d)", device, action,
                        text == nullptr ? "unknown error" : text, result));
  }

  const Functions f_;
  Mutex mutex_;
  std::map<int, Context> contexts_ MUOND_GUARDED_BY(mutex_);
  Mutex programs_mutex_;  // taken before mutex_
  std::map<int, void*> programs_ MUOND_GUARDED_BY(programs_mutex_);
};

absl::StatusOr<std::shared_ptr<GpuDriver>> Load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError("GPU driver: there is no libcuda.so.1 in this process's reach");
  }
  // Stays for the life of the process, as the driver's own threads do.
  MUOND_ASSIGN_OR_RETURN(const Functions functions, FindAll(library));
  if (const Result result = functions.Init(0); result != kSuccess) {
    const char* text = nullptr;
    functions.GetErrorString(result, &text);
    return absl::UnavailableError(absl::StrFormat("GPU driver: it did not start: %s",
                                                  text == nullptr ? "unknown error" : text));
  }
  return std::shared_ptr<GpuDriver>(std::make_shared<MachineDriver>(functions));
}

}  // namespace

absl::StatusOr<std::shared_ptr<GpuDriver>> LoadGpuDriver() {
  static const auto* const driver = new absl::StatusOr<std::shared_ptr<GpuDriver>>(Load());
  return *driver;
}

}  // namespace muond::client
