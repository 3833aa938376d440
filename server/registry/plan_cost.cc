#include "server/registry/plan_cost.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"

namespace muond {
namespace {

// Lengths of the sets of kernels/coefficients.cc, which planning must not need;
// tests/conformance/plan_steps_test.cc holds the two against each other.
constexpr std::array<std::pair<std::string_view, std::int64_t>, 10> kSetSteps = {{
    {"simple", 5},
    {"quintic_yj", 5},
    {"polar_express_105", 5},
    {"polar_express_dion", 5},
    {"polar_express_101", 5},
    {"polar_express_101_8", 8},
    {"polar_express_dion4", 4},
    {"polar_express_dion3", 3},
    {"cubic5", 5},
    {"deepseek_v4", 10},
}};

}  // namespace

absl::StatusOr<std::int64_t> NewtonSchulzSteps(const GroupSpec& group) {
  if (group.coefficients == "custom") {
    return static_cast<std::int64_t>(group.custom_steps.size() / 3);
  }
  const std::string wanted = group.coefficients.empty() ? "simple" : group.coefficients;
  std::string known;
  for (const auto& [name, steps] : kSetSteps) {
    if (wanted == name) return steps;
    known += std::string(name) + ", ";
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("group \"%s\": coefficients: expected one of %scustom, got \"%s\"",
                      group.name, known, wanted));
}

Flops NewtonSchulzFlops(std::int64_t rows, std::int64_t cols, std::int64_t steps) {
  const Flops low = static_cast<Flops>(std::min(rows, cols));
  const Flops high = static_cast<Flops>(std::max(rows, cols));
  return static_cast<Flops>(steps) * (4 * high * low * low + 2 * low * low * low);
}

Flops SingleOwnershipFloor(const std::vector<Flops>& costs, std::int64_t owners) {
  std::vector<Flops> sums = {0};  // sums[i]: of the i largest
  sums.reserve(costs.size() + 1);
  for (const Flops cost : costs) sums.push_back(sums.back() + cost);
  const auto count = static_cast<Flops>(owners);
  Flops floor = (sums.back() + count - 1) / count;
  const auto step = static_cast<std::size_t>(owners);
  for (std::size_t j = 0; j * step < costs.size(); ++j) {
    const std::size_t end = j * step + 1;
    floor = std::max(floor, sums[end] - sums[end - (j + 1)]);
  }
  return floor;
}

}  // namespace muond
