#include "client/bench/memory_need.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/str_format.h"

namespace muond::bench {
namespace {

double GiB(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

}  // namespace

MemoryNeed EstimateMemory(const Model& model, Dtype dtype, bool daemon_here) {
  const std::int64_t width = static_cast<std::int64_t>(DtypeBytes(dtype));
  MemoryNeed need{.client_bytes = 2 * width * model.Elements()};
  if (!daemon_here) return need;
  std::int64_t largest = 0;
  for (const ModelTensor& tensor : model.tensors) {
    const std::int64_t elements = Model{.name = {}, .tensors = {tensor}}.Elements();
    const bool muon = tensor.kind == Kind::kMatrix && tensor.role == Role::kHidden;
    need.daemon_bytes += elements * ((muon ? 8 : 12) + width + 4);
    if (muon) largest = std::max(largest, elements);
  }
  need.daemon_bytes += 6 * 4 * largest;
  return need;
}

bool IsLocalEndpoint(const std::string& endpoint) {
  return endpoint.starts_with("unix:") || endpoint.starts_with("127.") ||
         endpoint.starts_with("localhost:") || endpoint.starts_with("[::1]:");
}

std::int64_t AvailableMemory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  while (file >> key) {
    if (key == "MemAvailable:") {
      std::int64_t kib = 0;
      return file >> kib ? kib * 1024 : -1;
    }
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return -1;
}

absl::Status CheckMemory(const Model& model, const MemoryNeed& need, std::int64_t available) {
  if (available < 0 || need.client_bytes + need.daemon_bytes <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "model \"%s\" (%.3g elements) needs about %.1f GiB on this machine (this program %.1f, the "
      "daemon %.1f), %.1f GiB are available; take a smaller model or a 16-bit dtype",
      model.name, static_cast<double>(model.Elements()), GiB(need.client_bytes + need.daemon_bytes),
      GiB(need.client_bytes), GiB(need.daemon_bytes), GiB(available)));
}

}  // namespace muond::bench
