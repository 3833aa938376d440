// What the conversions of proto/convert.h share among their files; nobody else includes it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "muond/v1/types.pb.h"
#include "proto/values.h"

namespace muond::internal {

// `status` with the object that it is about put in front: `parameter "w": kind: unknown value 17`.
inline absl::Status About(const std::string& object, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(object, ": ", status.message()));
}

// Enumerations whose numbers are the same on both sides are cast; the static_asserts beside each
// use keep it so. proto3 lets any number through, hence `valid`.
template <typename Value, typename Message>
absl::StatusOr<Value> CastEnum(const char* field, Message message, bool valid) {
  if (!valid) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: unknown value %d", field, static_cast<int>(message)));
  }
  return static_cast<Value>(message);
}

// INVALID_ARGUMENT naming the field unless `value` is finite and >= 0.
absl::Status CheckNotNegative(const char* field, double value);
absl::Status CheckNotNegative(const char* field, std::int64_t value);

// One algorithm's hyperparameters of a group. The fields that belong to the other algorithm are
// ignored and come out as its defaults.
absl::StatusOr<Hyperparameters> HyperparametersFromProto(const std::string& group,
                                                         Algorithm algorithm,
                                                         const v1::Hyperparameters& message);

}  // namespace muond::internal
