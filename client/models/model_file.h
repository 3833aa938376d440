// Model files: a run's parameters, groups and rules as JSON. docs/planning.md has the format.
//
// Pure functions but for reading the file: no thread rule.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond::models {

// The run that `text` describes. Parameters that name no dtype are of `dtype`, those that name no
// group are in "all"; where the file lists no groups, every one that is named is of algorithm auto.
// INVALID_ARGUMENT that names `file`, the entry and the key for anything that is not of the format:
// `model file "m.json": parameters[3] "wq": shape: expected a list of whole numbers, got "big"`.
// Whether the parameters can be routed is for RouteParameters to say.
absl::StatusOr<RunSpec> ParseModelFile(const std::string& text, const std::string& file,
                                       Dtype dtype);

// The same of the file at that path. NOT_FOUND when there is none that can be read.
absl::StatusOr<RunSpec> LoadModelFile(const std::string& path, Dtype dtype);

}  // namespace muond::models
