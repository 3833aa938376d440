#include "server/engine/engine_for_test.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "gmock/gmock.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Memory, EngineTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

TEST_P(EngineTest, CommitsTheGoldenFirstStep) {
  Make();
  Reduce(0, {3, 0, 0, 4});
  Reduce(1, {2, 2, 2});
  const auto report = engine_->Commit(Request());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->newton_schulz_calls, 1);
  const auto w = Weights(0, 4);
  EXPECT_NEAR(w[0], .9177124, 1e-6);
  EXPECT_NEAR(w[3], .8780796, 1e-6);
  EXPECT_NEAR(Weights(1, 3)[0], .8990000005, 1e-6);
  EXPECT_EQ(engine_->Facts(0).t, 1);
}

TEST_P(EngineTest, ReducingAndDiscardingTouchesNothing) {
  Make();
  const std::string before = Digest();
  const auto reduced = Reduce(0, {std::numeric_limits<float>::infinity(), 0, 0, NAN});
  EXPECT_EQ(reduced.nonfinite, 2);
  Reduce(1, {2, 2, 2});
  engine_->Discard();
  EXPECT_EQ(Digest(), before);
}

TEST_P(EngineTest, AnAbsentParameterKeepsEveryByteAndItsT) {
  Make();
  const std::string before = Digest("w");
  Reduce(1, {2, 2, 2});
  ASSERT_TRUE(engine_->Commit(Request({0})).ok());
  EXPECT_EQ(Digest("w"), before);
  EXPECT_EQ(engine_->Facts(0).t, 0);
  EXPECT_EQ(engine_->Facts(1).t, 1);
}

TEST_P(EngineTest, IndependentDecayIsMuonsOnly) {
  spec_.groups[0].weight_decay_form = WeightDecayForm::kIndependent;
  Make();
  Reduce(0, {0, 0, 0, 0});
  Reduce(1, {0, 0, 0});
  ASSERT_TRUE(engine_->Commit(Request()).ok());
  EXPECT_FLOAT_EQ(Weights(0, 4)[0], 0.9f);    // 1 - weight_decay
  EXPECT_FLOAT_EQ(Weights(1, 3)[0], 0.999f);  // 1 - lr * weight_decay
}

TEST_P(EngineTest, LayersAreSummedInOrderAndDivided) {
  Make();
  const auto reduced = Reduce({{0, {Layer({2, 0, 0, 0}), Layer({0, 0, 0, 2})}, 2}})[0];
  EXPECT_EQ(reduced.max_abs, 1);
  ASSERT_EQ(reduced.block_sums.size(), 1u);
  EXPECT_EQ(reduced.block_sums[0], 2);
  EXPECT_TRUE(reduced.layers_free) << "the sum is elsewhere";
}

TEST_P(EngineTest, ReductionsTogetherAreThoseOfEach) {
  Make();
  const auto together = Reduce(
      {{1, {Layer({2, -4, 2})}, 2}, {0, {Layer({1, 2, 3, INFINITY}), Layer({1, 1, 1, 1})}, 1}});
  EXPECT_EQ(together[0].max_abs, 2);
  EXPECT_EQ(together[0].block_sums, std::vector<double>{6});
  EXPECT_EQ(together[1].nonfinite, 1);
  EXPECT_EQ(together[1].max_abs, 4);
}

TEST_P(EngineTest, StateOverflowIsForeseen) {
  Make();
  EXPECT_FALSE(Reduce(1, {2, 2, 2}).state_overflow);
  engine_->Discard();
  EXPECT_TRUE(Reduce(1, {2, 1e25f, 2}).state_overflow);
}

TEST_P(EngineTest, ReplicasThatDisagreeAreRefusedAndNothingIsWritten) {
  spec_.parameters[1].replicated = true;
  auto engine = Engine::Create(*backend_, spec_, routing_, WholeRun(routing_), 0, {});
  ASSERT_TRUE(engine.ok());
  engine_ = *std::move(engine);
  ASSERT_TRUE(WriteInitial(1, {{0}, {2}, true}, {1, 2}).ok());
  const absl::Status refused = WriteInitial(1, {{1}, {2}, true}, {9, 3});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("replicas disagree"));
  EXPECT_THAT(Weights(1, 3), ::testing::ElementsAre(1, 2, 0));
  EXPECT_TRUE(WriteInitial(1, {{1}, {2}, true}, {2, 3}).ok());
  EXPECT_THAT(Weights(1, 3), ::testing::ElementsAre(1, 2, 3));
}

TEST_P(EngineTest, NonFiniteInitialValuesAreRefusedByName) {
  Make();
  const absl::Status refused = WriteInitial(1, WholeBox({3}), {1, NAN, 1});
  EXPECT_EQ(std::string(refused.message()),
            "parameter \"b\": initial values of [0:3]: 1 non-finite elements");
}

TEST_P(EngineTest, ReadsASliceRoundedToTheDtype) {
  Make();
  // 1 + 2^-8: half a unit of bf16, ties to even.
  ASSERT_TRUE(WriteInitial(0, WholeBox({2, 2}), {1.00390625f, 2, 3, 4}).ok());
  std::uint16_t column[2];
  ASSERT_TRUE(engine_->Read(0, {{0, 0}, {2, 1}}, 0, 2, Dtype::kBF16, column).ok());
  EXPECT_EQ(kernels::BF16ToFloat(column[0]), 1.0f);
  EXPECT_EQ(kernels::BF16ToFloat(column[1]), 3.0f);
}

TEST_P(EngineTest, DigestSeesEveryStateTensorAndT) {
  Make();
  const std::string before = Digest();
  Reduce(0, {0, 0, 0, 0});
  Reduce(1, {0, 0, 0});
  CommitRequest still = Request();
  still.muon["all"].lr = still.adamw["all"].lr = 0;
  ASSERT_TRUE(engine_->Commit(still).ok());
  EXPECT_THAT(Weights(0, 4), ::testing::ElementsAre(1, 0, 0, 1));
  EXPECT_NE(Digest(), before) << "t has advanced";
}

TEST_P(EngineTest, AFailedOrthogonalizationLeavesTheWeightsFinite) {
  backend_ = Placed(kernels::MakeCpuBackend({.threads = 1, .newton_schulz_fault = &fault_}));
  Make();
  ASSERT_TRUE(points_.ArmFromSpec("newton_schulz_fast_path_nan,newton_schulz_fallback_nan").ok());
  Reduce(0, {3, 0, 0, 4});
  Reduce(1, {2, 2, 2});
  const auto report = engine_->Commit(Request());
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->failure, HasSubstr("\"w\""));
  for (float value : Weights(0, 4)) EXPECT_TRUE(std::isfinite(value));
}

TEST_P(EngineTest, Dion76_ABadFastPathIsRedoneAndCounted) {
  backend_ = Placed(kernels::MakeCpuBackend({.threads = 1, .newton_schulz_fault = &fault_}));
  Make();
  ASSERT_TRUE(points_.ArmFromSpec("newton_schulz_fast_path_nan").ok());
  Reduce(0, {3, 0, 0, 4});
  Reduce(1, {2, 2, 2});
  const auto report = engine_->Commit(Request());
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->failure, "");
  EXPECT_EQ(report->newton_schulz_fallbacks, 1);
  EXPECT_EQ(report->newton_schulz_calls, 1);
  EXPECT_NEAR(Weights(0, 4)[0], .9177124, 1e-5);
}

}  // namespace
}  // namespace muond
