// Where two ranks' ideas of one run part. Pure.
#pragma once

#include <string>

#include "proto/values.h"

namespace muond {

// The first field, in the order of values.h, in which the specs differ, with both values:
// `parameter "w": shape: the run has [4, 4], this rank sent [2, 4]`. Empty when they are equal.
std::string FirstDifference(const RunSpec& run, const RunSpec& sent);

}  // namespace muond
