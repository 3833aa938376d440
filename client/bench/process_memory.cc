#include "client/bench/process_memory.h"

#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_format.h"

namespace muond::bench {
namespace {

// A line "Key:   123 kB" of /proc/<pid>/status in bytes.
std::int64_t StatusField(std::int64_t pid, const std::string& wanted) {
  std::ifstream file(absl::StrFormat("/proc/%d/status", pid));
  std::string key;
  while (file >> key) {
    if (key == wanted) {
      std::int64_t kib = 0;
      return file >> kib ? kib * 1024 : -1;
    }
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return -1;
}

}  // namespace

std::int64_t ResidentBytes(std::int64_t pid) { return StatusField(pid, "VmRSS:"); }
std::int64_t PeakResidentBytes(std::int64_t pid) { return StatusField(pid, "VmHWM:"); }

bool ResetPeak(std::int64_t pid) {
  std::ofstream file(absl::StrFormat("/proc/%d/clear_refs", pid));
  return static_cast<bool>(file << "5" << std::flush);
}

}  // namespace muond::bench
