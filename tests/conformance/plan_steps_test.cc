// The planner counts the iterations of Newton-Schulz without the kernels: both must know the same.
#include "gtest/gtest.h"
#include "kernels/coefficients.h"
#include "server/registry/plan_cost.h"

namespace muond {
namespace {

TEST(PlanSteps, AreThoseOfTheKernels) {
  for (const kernels::CoefficientSet& set : kernels::CoefficientSets()) {
    GroupSpec group{.name = "g"};
    group.coefficients = std::string(set.name);
    const absl::StatusOr<std::int64_t> steps = NewtonSchulzSteps(group);
    ASSERT_TRUE(steps.ok()) << steps.status();
    EXPECT_EQ(*steps, static_cast<std::int64_t>(set.steps.size())) << set.name;
  }
}

}  // namespace
}  // namespace muond
