#include "server/registry/plan_cost.h"

#include <algorithm>
#include <functional>
#include <random>

#include "server/registry/plan_for_test.h"

namespace muond {
namespace {

TEST(PlanCost, FlopsAreThoseOfTheStandardForm) {
  EXPECT_TRUE(NewtonSchulzFlops(4, 3, 1) == 4 * 4 * 9 + 2 * 27);
  EXPECT_TRUE(NewtonSchulzFlops(3, 4, 5) == 5 * NewtonSchulzFlops(4, 3, 1));
  const Flops huge = NewtonSchulzFlops(std::int64_t{1} << 30, std::int64_t{1} << 30, 10);
  EXPECT_TRUE(huge == (static_cast<Flops>(60) << 90)) << "beyond 64 bits";
}

TEST(PlanCost, StepsAreTheGroupsOwn) {
  GroupSpec group = GroupOf("g", Algorithm::kAuto);
  EXPECT_EQ(NewtonSchulzSteps(group).value(), 5);
  group.coefficients = "";
  EXPECT_EQ(NewtonSchulzSteps(group).value(), 5) << "nothing said is the default";
  group.coefficients = "polar_express_dion3";
  EXPECT_EQ(NewtonSchulzSteps(group).value(), 3);
  group.coefficients = "custom";
  group.custom_steps = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(NewtonSchulzSteps(group).value(), 2);
  group.coefficients = "simpel";
  EXPECT_STATUS(NewtonSchulzSteps(group), absl::IsInvalidArgument,
                "group \"g\": coefficients: expected one of simple, ");
}

TEST(PlanCost, FloorOfEqualCostsIsCeil) {
  for (int count = 1; count < 40; ++count) {
    for (int owners = 1; owners < 12; ++owners) {
      const std::vector<Flops> costs(static_cast<std::size_t>(count), Flops{7});
      EXPECT_TRUE(SingleOwnershipFloor(costs, owners) ==
                  static_cast<Flops>(7 * ((count + owners - 1) / owners)));
    }
  }
}

// The smallest largest load over all assignments of costs[at..].
std::int64_t Best(const std::vector<std::int64_t>& costs, std::size_t at,
                  std::vector<std::int64_t>& loads) {
  if (at == costs.size()) return *std::max_element(loads.begin(), loads.end());
  std::int64_t best = INT64_MAX;
  for (std::int64_t& load : loads) {
    load += costs[at];
    best = std::min(best, Best(costs, at + 1, loads));
    load -= costs[at];
  }
  return best;
}

TEST(PlanCost, FloorIsNeverAboveTheBestAssignmentAndOftenIt) {
  std::mt19937_64 random(7);
  int met = 0;
  constexpr int kTries = 300;
  for (int i = 0; i < kTries; ++i) {
    std::vector<std::int64_t> costs(1 + random() % 7);
    for (std::int64_t& cost : costs) cost = 1 + static_cast<std::int64_t>(random() % 9);
    std::sort(costs.begin(), costs.end(), std::greater<>());
    std::vector<std::int64_t> loads(1 + random() % 4, 0);
    const std::int64_t best = Best(costs, 0, loads);
    const Flops floor = SingleOwnershipFloor(std::vector<Flops>(costs.begin(), costs.end()),
                                             static_cast<std::int64_t>(loads.size()));
    EXPECT_TRUE(floor <= static_cast<Flops>(best));
    met += floor == static_cast<Flops>(best) ? 1 : 0;
  }
  EXPECT_GT(met, kTries / 2);
}

TEST(PlanCost, FloorWithoutCostsIsZero) { EXPECT_TRUE(SingleOwnershipFloor({}, 3) == 0); }

}  // namespace
}  // namespace muond
