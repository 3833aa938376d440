// The estimate of a step's time: its arithmetic, and that it comes near to what was measured.
#include "server/registry/step_time.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "server/registry/plan_for_test.h"

namespace muond {
namespace {

constexpr std::int64_t kIterateBytes = 2;  // of a GPU

MachineRates Unit() {
  return {.name = "unit", .newton_schulz_tflops = 1, .memory_gbps = 1, .link_gbps = 1};
}

StepTime TimeOf(RunSpec run, const PlanOptions& options, const MachineRates& rates) {
  for (ParameterSpec& parameter : run.parameters) parameter.dtype = Dtype::kBF16;
  const Routing routing = RouteParameters(run).value();
  const Plan plan = MakePlan(run, routing, options).value();
  return EstimateStepTime(run, routing, plan, kIterateBytes, rates).value();
}

// The closed forms: rounding of doubles only.
TEST(StepTime, CountsOperationsAndBytes) {
  EXPECT_DOUBLE_EQ(SymmetricFlops(1000, 1000, 5), 20e9) << "square: both forms cost the same";
  EXPECT_DOUBLE_EQ(SymmetricFlops(1000, 4000, 5), 38e9) << "long: the Gram form";
  EXPECT_DOUBLE_EQ(SymmetricFlops(4000, 1000, 10), 76e9) << "either way round, steps in proportion";
  EXPECT_DOUBLE_EQ(SymmetricFlops(0, 8, 5), 0);

  const StepTime time = TimeOf(RunOf({Tensor("w", {1000, 1000}), Tensor("b", {500})}), Daemons(1),
                               Unit());
  ASSERT_EQ(time.owners.size(), 1u);
  EXPECT_DOUBLE_EQ(time.owners[0].newton_schulz_ms, 20);
  // bf16: 2 + 2 + 2 bytes of gradient, again, and parameter; state 16 and U, O 4, or state 24.
  EXPECT_DOUBLE_EQ(time.owners[0].passes_ms, (1e6 * 26 + 500 * 30) / 1e6);
  EXPECT_DOUBLE_EQ(time.owners[0].link_ms, 1000500 * 4 / 1e6);
  EXPECT_DOUBLE_EQ(time.step_ms, time.owners[0].Sum());
  EXPECT_DOUBLE_EQ(time.efficiency, 1);
}

TEST(StepTime, TheBusiestOwnerAndThePeersDecide) {
  MachineRates rates = Unit();
  rates.step_ms = 3;
  rates.peer_ms = 7;
  // Two owners, three equal matrices: one has two of them.
  const RunSpec run = RunOf({Tensor("a", {1000, 1000}), Tensor("b", {1000, 1000}),
                             Tensor("c", {1000, 1000})});
  const StepTime two = TimeOf(run, Daemons(2), rates);
  EXPECT_DOUBLE_EQ(two.owners[two.busiest].newton_schulz_ms, 40);
  EXPECT_DOUBLE_EQ(two.calls_ms, 10);
  EXPECT_DOUBLE_EQ(two.step_ms, two.owners[two.busiest].Sum() + 10);
  const StepTime one = TimeOf(run, Daemons(1), rates);
  EXPECT_DOUBLE_EQ(two.efficiency, one.step_ms / (2 * two.step_ms));
  // Devices of one daemon tell each other nothing.
  EXPECT_DOUBLE_EQ(TimeOf(run, Daemons(1, 2), rates).calls_ms, 3);
}

// docs/performance.md, "The data paths of a GPU": what an H200 took for a whole step over CUDA IPC.
// The estimate is within 0.2 ms of it: with Newton-Schulz a hundredth faster or slower, or memory a
// tenth, it is not.
TEST(StepTime, IsNearWhatAnH200Took) {
  const MachineRates h200 = FindMachine("h200").value();
  PlanOptions options = Daemons(1);
  options.iterate_bytes = kIterateBytes;
  options.device_memory = true;
  EXPECT_NEAR(TimeOf(Llama1B(), options, h200).step_ms, 48.7, 0.3);
}

TEST(StepTime, RefusesRatesThatAreNone) {
  EXPECT_STATUS(FindMachine("h2000").status(), absl::IsNotFound,
                "machine \"h2000\": expected one of h200");
  for (const double bad : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    MachineRates rates = Unit();
    rates.memory_gbps = bad;
    EXPECT_STATUS(ValidateRates(rates), absl::IsInvalidArgument,
                  absl::StrFormat("\"unit\": memory_gbps: expected more than 0, got %g", bad));
  }
  MachineRates rates = Unit();
  rates.peer_ms = -1;
  EXPECT_STATUS(ValidateRates(rates), absl::IsInvalidArgument, "peer_ms: expected 0 or more");
}

}  // namespace
}  // namespace muond
