// Numbers as people read them. Machines get them unrounded by `-o json`.
#pragma once

#include <cstdint>
#include <string>

#include "muond/v1/types.pb.h"

namespace muond::cli {

std::string FormatBytes(std::int64_t bytes);    // "512 B", "12.3 MiB"
std::string FormatNumber(double value);         // four digits: "0.01234", "65536", "1.2e-05", "nan"
std::string FormatSeconds(double seconds);      // "0.35s", "12s", "3m12s", "2h5m", "4d3h"
std::string FormatCount(std::int64_t count);    // "1234567"

// "[4096, 1024]"; "?" when the shape is missing.
std::string FormatShape(const v1::Parameter& parameter);
// What is orthogonalized: "768x768", "8 of 1024x4096", several joined by " + "; "-" for none.
std::string FormatMatrices(const v1::RoutedParameter& routed);

// An enumerator's name without its type's prefix, in lower case: RUN_STATE_RUNNING -> "running".
std::string ShortEnumName(const google::protobuf::EnumValueDescriptor& value);

}  // namespace muond::cli
