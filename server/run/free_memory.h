// How much memory a new run may take when the operator set no limit.
#pragma once

#include <cstdint>

namespace muond {

// Bytes that the machine can give to a new workload without swapping (MemAvailable). 0 when the
// kernel does not say.
std::int64_t FreeMemoryBytes();

}  // namespace muond
