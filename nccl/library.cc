#include "nccl/library.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <map>

#include "absl/strings/str_format.h"
#include "proto/mutex.h"

namespace muond::nccl {
namespace {

constexpr char kUsualName[] = "libnccl.so.2";
// Nonblocking communicators with their configuration as declared in api.h.
constexpr int kOldest = 21800;

absl::Status Missing(const std::string& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrFormat("NCCL: \"%s\": %s", path, why));
}

template <typename Function>
bool Find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
  return function != nullptr;
}

absl::StatusOr<const Library*> Open(const std::string& path) {
  // What is set here counts for communicators of this process alone.
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Missing(path, dlerror());
  auto* const library = new Library{.path = path};
  Api& api = library->api;
  std::string missing;
  Find(handle, "ncclGetVersion", api.get_version, missing);
  Find(handle, "ncclGetUniqueId", api.get_unique_id, missing);
  Find(handle, "ncclCommInitRankConfig", api.comm_init_rank_config, missing);
  Find(handle, "ncclCommGetAsyncError", api.comm_get_async_error, missing);
  Find(handle, "ncclCommAbort", api.comm_abort, missing);
  Find(handle, "ncclGetLastError", api.get_last_error, missing);
  Find(handle, "ncclGroupStart", api.group_start, missing);
  Find(handle, "ncclGroupEnd", api.group_end, missing);
  Find(handle, "ncclSend", api.send, missing);
  Find(handle, "ncclRecv", api.recv, missing);
  if (!missing.empty()) {
    delete library;
    return Missing(path, "it has no " + missing);
  }
  if (api.get_version(&library->version) != Result::kSuccess || library->version < kOldest) {
    const std::string version = VersionText(library->version);
    delete library;
    return Missing(path, absl::StrFormat("it is version %s, at least %s is needed", version,
                                         VersionText(kOldest)));
  }
  return library;
}

}  // namespace

absl::StatusOr<const Library*> Load(const std::string& path) {
  static Mutex mutex;
  static auto* const opened = new std::map<std::string, const Library*>();
  std::string wanted = path;
  if (wanted.empty()) {
    const char* const named = getenv("MUOND_NCCL_LIBRARY");
    wanted = named != nullptr && *named != '\0' ? named : kUsualName;
  }
  MutexLock lock(mutex);
  const auto found = opened->find(wanted);
  if (found != opened->end()) return found->second;
  auto library = Open(wanted);
  if (library.ok()) opened->emplace(wanted, *library);
  return library;
}

std::string VersionText(int version) {
  if (version <= 0) return "none";
  const int unit = version < 10000 ? 1000 : 10000;  // 2.8 and older were numbered by thousands
  return absl::StrFormat("%d.%d.%d", version / unit, version % unit / 100, version % 100);
}

absl::Status CheckVersions(int ours, int theirs) {
  if (ours == theirs && ours > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("NCCL: the daemon has version %s, the trainer %s: they must be the same",
                      VersionText(ours), VersionText(theirs)));
}

std::string ResultName(Result result) {
  switch (result) {
    case Result::kSuccess:
      return "ncclSuccess";
    case Result::kUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case Result::kSystemError:
      return "ncclSystemError";
    case Result::kInternalError:
      return "ncclInternalError";
    case Result::kInvalidArgument:
      return "ncclInvalidArgument";
    case Result::kInvalidUsage:
      return "ncclInvalidUsage";
    case Result::kRemoteError:
      return "ncclRemoteError";
    case Result::kInProgress:
      return "ncclInProgress";
  }
  return absl::StrFormat("NCCL result %d", static_cast<int>(result));
}

}  // namespace muond::nccl
