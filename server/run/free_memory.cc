#include "server/run/free_memory.h"

#include <fstream>
#include <string>

namespace muond {

std::int64_t FreeMemoryBytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  std::int64_t kibibytes = 0;
  while (meminfo >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * 1024;
    std::getline(meminfo, unit);
  }
  return 0;
}

}  // namespace muond
