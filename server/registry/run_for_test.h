// Short ways to write runs down in tests.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond {

inline ParameterSpec Tensor(std::string name, Dims shape, Role role = Role::kUnspecified,
                            Kind kind = Kind::kUnspecified) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.group = "g";
  spec.role = role;
  spec.kind = kind;
  return spec;
}

inline GroupSpec GroupOf(std::string name, Algorithm algorithm) {
  GroupSpec group;
  group.name = std::move(name);
  group.algorithm = algorithm;
  return group;
}

// A run of one rank with one group "g" of the given algorithm.
inline RunSpec RunOf(std::vector<ParameterSpec> parameters,
                     Algorithm algorithm = Algorithm::kAuto) {
  RunSpec run;
  run.name = "r";
  run.parameters = std::move(parameters);
  run.groups.push_back(GroupOf("g", algorithm));
  return run;
}

// Expects a StatusOr or Status of this code whose message holds `says`.
#define EXPECT_STATUS(expression, is_code, says)                             \
  do {                                                                       \
    const absl::Status status_ = ::muond::StatusOf(expression);              \
    EXPECT_TRUE(is_code(status_)) << status_;                                \
    EXPECT_THAT(std::string(status_.message()), ::testing::HasSubstr(says)); \
  } while (false)

inline absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

}  // namespace muond
