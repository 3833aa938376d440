// What stands behind the opaque handles of muond.h, and how C++ is kept on its own side of it:
// codes, structures that grow, JSON, exceptions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/c/muond.h"
#include "client/cpp/admin.h"
#include "client/cpp/session.h"
#include "google/protobuf/message.h"
#include "proto/mutex.h"

struct muond_error {
  absl::Status status;
  std::string message;
};

struct muond_text {
  std::string text;
};

struct muond_session {
  muond::Mutex mutex;  // calls wait for each other: WithSession takes it for them
  std::string run;
  std::unique_ptr<muond::client::Session> session;
  std::unique_ptr<muond::client::Admin> admin;
  std::unique_ptr<muond::client::Admin> checkpoints;  // has the time that disks need
};

namespace muond::c {

// Gives the caller code and error; never throws: with no memory left the code alone must do.
int32_t Answer(const absl::Status& status, muond_error** error) noexcept;

// Runs `body`, which returns absl::Status, and turns whatever it ends with into code and error.
template <typename Body>
int32_t Guard(muond_error** error, Body&& body) noexcept {
  absl::Status status;
  try {
    status = std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return Answer(absl::Status(absl::StatusCode::kResourceExhausted, "out of memory"), error);
  } catch (const std::exception& exception) {
    return Answer(absl::InternalError(exception.what()), error);
  } catch (...) {
    return Answer(absl::InternalError("an exception of unknown type"), error);
  }
  return Answer(status, error);
}

// INVALID_ARGUMENT unless the pointer is there; `what` is the argument's name.
absl::Status CheckThere(const char* what, const void* pointer);

inline std::string Text(const char* data, size_t bytes) {
  return data == nullptr ? std::string() : std::string(data, bytes);
}

// The caller's structure in this library's size: what the caller's lacks is zero. A NULL pointer
// is a structure of zeros. INVALID_ARGUMENT for a struct_bytes that can't be right.
template <typename Struct>
absl::StatusOr<Struct> ReadStruct(const char* what, const Struct* given) {
  Struct value{};
  if (given == nullptr) return value;
  constexpr size_t kBytesMax = 65536;
  if (given->struct_bytes < sizeof(size_t) || given->struct_bytes > kBytesMax) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: struct_bytes: expected sizeof the structure, got %d", what, given->struct_bytes));
  }
  std::memcpy(&value, given, std::min(sizeof(Struct), given->struct_bytes));
  value.struct_bytes = sizeof(Struct);
  return value;
}

// Likewise the other way: fills as much as the caller's structure has.
template <typename Struct>
absl::Status WriteStruct(const char* what, Struct value, Struct* out) {
  if (absl::Status status = CheckThere(what, out); !status.ok()) return status;
  if (out->struct_bytes < sizeof(size_t)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: struct_bytes: expected sizeof the structure, got %d", what,
                        out->struct_bytes));
  }
  value.struct_bytes = out->struct_bytes;
  std::memcpy(out, &value, std::min(sizeof(Struct), out->struct_bytes));
  return absl::OkStatus();
}

// protobuf's JSON. INVALID_ARGUMENT that names `what` and the place.
absl::Status FromJson(const char* what, const std::string& json,
                      google::protobuf::Message* message);
absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message);
// Of an answer, or its error.
template <typename Message>
absl::StatusOr<std::string> Json(const absl::StatusOr<Message>& answer) {
  if (!answer.ok()) return answer.status();
  return ToJson(*answer);
}

// Gives a text to the caller.
absl::Status GiveText(absl::StatusOr<std::string> text, muond_text** out);

}  // namespace muond::c
