// How much memory a process of this machine holds, as the kernel counts it.
#pragma once

#include <cstdint>

namespace muond::bench {

// Resident bytes (VmRSS) of process `pid`; -1 when it can't be read.
std::int64_t ResidentBytes(std::int64_t pid);

// The largest it was (VmHWM) since it started or ResetPeak; -1 when it can't be read.
std::int64_t PeakResidentBytes(std::int64_t pid);

// Starts the peak anew. False without the right to (another user's process): the peak then covers
// its whole life.
bool ResetPeak(std::int64_t pid);

}  // namespace muond::bench
