// Where NCCL comes from: a shared library that is looked for at run time, once, and may be missing.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nccl/api.h"

namespace muond::nccl {

struct Library {
  Api api{};
  int version = 0;   // as NCCL numbers them: 22809
  std::string path;  // what was opened, for the log
};

// Opens `path`, or where it is empty $MUOND_NCCL_LIBRARY, or libnccl.so.2 wherever the loader finds
// it. Sets NCCL_NVLS_ENABLE=0 in the environment first, unless the operator has set it: NVLink
// multicast is never needed between two ranks. FAILED_PRECONDITION that says what is missing.
// Never unloaded: NCCL keeps threads. Any thread.
absl::StatusOr<const Library*> Load(const std::string& path = "");

// "2.28.9"; "none" for 0.
std::string VersionText(int version);

// OK iff two ranks with these versions may share a communicator: NCCL speaks to its own version
// only. FAILED_PRECONDITION naming both.
absl::Status CheckVersions(int ours, int theirs);

// "ncclRemoteError" and so on.
std::string ResultName(Result result);

}  // namespace muond::nccl
