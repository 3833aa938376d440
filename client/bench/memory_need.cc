#include "client/bench/memory_need.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/str_format.h"

namespace muond::bench {
namespace {

constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kBatchElements = std::int64_t{32} << 20;
// Matrices beyond this many elements are orthogonalized one by one, smaller ones side by side.
constexpr std::int64_t kSharedElements = std::int64_t{4} << 20;

double GiB(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

}  // namespace

MemoryNeed EstimateMemory(const models::Model& model, Dtype dtype, bool daemon_here, int threads,
                          Dtype momentum_dtype) {
  const auto momentum_bytes = static_cast<std::int64_t>(DtypeBytes(momentum_dtype));
  const std::int64_t gradients = static_cast<std::int64_t>(DtypeBytes(dtype)) * model.Elements();
  MemoryNeed need{.client = 2 * gradients};
  if (!daemon_here) return need;
  need.staging = gradients;
  std::int64_t muon_elements = 0, largest = 0, products = 0;
  for (const models::ModelTensor& tensor : model.tensors) {
    const std::int64_t elements = tensor.Elements();
    need.state += elements * (tensor.IsMuon() ? kFloatBytes + momentum_bytes : 3 * kFloatBytes);
    if (!tensor.IsMuon()) continue;
    const auto [m, n] = std::minmax(tensor.shape[0], tensor.shape[1]);
    const std::int64_t copies = elements > kSharedElements ? 1 : threads;
    // X in fp32 and twice in bf16; three squares in both.
    products = std::max(products, copies * (8 * m * n + 18 * m * m));
    muon_elements += elements;
    largest = std::max(largest, elements);
  }
  const std::int64_t batch = std::max(largest, std::min(muon_elements, kBatchElements));
  need.scratch = 2 * kFloatBytes * batch + products;
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

absl::Status CheckMemory(const models::Model& model, const MemoryNeed& need,
                         std::int64_t available) {
  if (available < 0 || need.Total() <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "model \"%s\" (%.3g elements) needs about %.1f GiB on this machine (this program %.1f, the "
      "daemon %.1f), %.1f GiB are available; take a smaller model or a 16-bit dtype",
      model.name, static_cast<double>(model.Elements()), GiB(need.Total()), GiB(need.client),
      GiB(need.Daemon()), GiB(available)));
}

bool MemoryWithinNeed(const MemoryNeed& need, const MemoryUse& use) {
  const double limit = (1 + kMemoryMargin) * static_cast<double>(need.Daemon());
  return static_cast<double>(use.grown) <= limit + static_cast<double>(kMemoryFixed);
}

}  // namespace muond::bench
