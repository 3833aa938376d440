// Exact cover: do boxes tile a tensor without gap or overlap? Pure, exact, and fast for the shapes
// that trainers use (flat ranges, row blocks, column blocks, 2-D tensor-parallel blocks).
//
// Boxes must be valid for the shape (ValidateBox); those without elements are ignored. Thousands of
// boxes that are staggered in every dimension can be too much to prove: RESOURCE_EXHAUSTED.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/values.h"

namespace muond {

struct OwnedBox {
  Box box;
  std::int64_t rank = 0;
};

// OK iff no element lies in two boxes. Else INVALID_ARGUMENT: `parameter "w": slices of ranks 0 and
// 1 overlap at elements [6, 7)` (first common interval of the flattened tensor).
absl::Status CheckNoOverlap(const std::string& parameter, const Dims& shape,
                            const std::vector<OwnedBox>& boxes);

// OK iff every element lies in exactly one box. A gap: `parameter "w": elements [6, 8) of 12 are in
// no rank's slices`.
absl::Status CheckExactCover(const std::string& parameter, const Dims& shape,
                             const std::vector<OwnedBox>& boxes);

}  // namespace muond
