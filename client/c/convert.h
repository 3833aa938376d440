// How the C interface's arguments become the C++ client's, and how a call on a session is wrapped:
// its mutex, its checks.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "client/c/handles.h"
#include "proto/mutex.h"

namespace muond::c {

// INVALID_ARGUMENT, or UNIMPLEMENTED for memory of an unknown kind, naming the parameter.
absl::StatusOr<std::vector<client::SliceSource>> Sources(const char* action,
                                                         const muond_source* sources, size_t count);
absl::StatusOr<std::vector<client::SliceSink>> Sinks(const char* action, const muond_sink* sinks,
                                                     size_t count);

// One call on a session, alone.
template <typename Body>
int32_t WithSession(muond_session* session, muond_error** error, Body&& body) noexcept {
  return Guard(error, [&]() -> absl::Status {
    if (absl::Status status = CheckThere("session", session); !status.ok()) return status;
    MutexLock lock(session->mutex);
    return std::forward<Body>(body)();
  });
}

// Likewise, with a text for the caller.
template <typename Body>
int32_t WithText(muond_session* session, muond_text** out, muond_error** error,
                 Body&& body) noexcept {
  return WithSession(session, error, [&]() -> absl::Status {
    if (absl::Status status = CheckThere("text", out); !status.ok()) return status;
    *out = nullptr;
    return GiveText(std::forward<Body>(body)(), out);
  });
}

}  // namespace muond::c
