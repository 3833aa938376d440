#include "server/engine/engine.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/device_like_backend.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

// An engine with a 2 x 2 Muon matrix "w" and an AdamW vector "b" of three elements, in the host's
// memory and in a device's.
class EngineTest : public ::testing::TestWithParam<bool> {
 protected:
  EngineTest() : backend_(Placed(kernels::MakeReferenceBackend())) {
    spec_.name = "run";
    GroupSpec group{.name = "all"};
    group.muon = {.lr = 0.1, .weight_decay = 0.1, .momentum = 0.95};
    group.adamw = {.lr = 0.1, .weight_decay = 0.01};
    spec_.groups = {group};
    spec_.parameters = {{.name = "w", .shape = Dims{2, 2}, .group = "all", .role = Role::kHidden},
                        {.name = "b", .shape = Dims{3}, .group = "all", .role = Role::kBias}};
    routing_ = *RouteParameters(spec_);
  }

  static std::unique_ptr<kernels::Backend> Placed(std::unique_ptr<kernels::Backend> backend) {
    if (!GetParam()) return backend;
    return testing::MakeDeviceLikeBackend(std::move(backend));
  }

  // Values as they come in.
  std::shared_ptr<StagingBuffer> Staged(const std::vector<float>& values) {
    auto memory = *engine_->AllocateStaging(values.size(), Dtype::kF32);
    std::memcpy(memory->data(), values.data(), values.size() * sizeof(float));
    return memory;
  }
  absl::Status WriteInitial(int state, const Box& box, const std::vector<float>& values) {
    return engine_->WriteInitial(state, box, Staged(values)->data(), Dtype::kF32);
  }

  void Make(bool overlap = false) {
    auto engine = Engine::Create(*backend_, spec_, routing_, WholeRun(routing_), 0,
                                 {&points_, &fault_}, overlap);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(WriteInitial(0, WholeBox({2, 2}), {1, 0, 0, 1}).ok());
    ASSERT_TRUE(WriteInitial(1, WholeBox({3}), {1, 1, 1}).ok());
    for (int more = 2; more < std::ssize(spec_.parameters); ++more) {
      ASSERT_TRUE(WriteInitial(more, WholeBox({2, 2}), {1, 0, 0, 1}).ok());
    }
    ASSERT_TRUE(engine_->FinishInitial().ok());
  }

  GradientLayer Layer(const std::vector<float>& values) { return {Staged(values), Dtype::kF32}; }
  ReducedGradient Reduce(int state, const std::vector<float>& values, double divisor = 1) {
    return Reduce({{state, {Layer(values)}, divisor}})[0];
  }
  std::vector<ReducedGradient> Reduce(const std::vector<ReduceRequest>& requests) {
    auto reduced = engine_->Reduce(requests);
    EXPECT_TRUE(reduced.ok()) << reduced.status();
    return reduced.ok() ? *reduced : std::vector<ReducedGradient>(requests.size());
  }
  std::string Digest() { return TensorDigest(spec_, *engine_->HashShards()); }
  std::string Digest(const std::string& parameter) {
    return ParameterDigests(spec_, *engine_->HashShards()).at(parameter);
  }

  CommitRequest Request(std::set<int> absent = {}) const {
    return {.absent = std::move(absent),
            .muon = {{"all", spec_.groups[0].muon}},
            .adamw = {{"all", spec_.groups[0].adamw}}};
  }

  std::vector<float> Weights(int state, std::int64_t count) {
    std::vector<float> values(count);
    EXPECT_TRUE(engine_
                    ->Read(state, WholeBox(*spec_.parameters[state].shape), 0, count, Dtype::kF32,
                           values.data())
                    .ok());
    return values;
  }

  std::unique_ptr<kernels::Backend> backend_;
  RunSpec spec_;
  Routing routing_;
  FaultInjector points_;
  kernels::NewtonSchulzFault fault_;
  std::unique_ptr<Engine> engine_;
};
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

// ---- Newton-Schulz ahead of the commit ---------------------------------------------------------

// Two steps, so that momentum counts: what state is after it, and what was counted.
TEST_P(EngineTest, EarlyOrthogonalizationGivesTheSameBits) {
  std::string digests[2];
  for (const bool early : {false, true}) {
    Make(early);
    for (const float x : {3.0f, -1.0f}) {
      Reduce(0, {x, 0.5f, 2, 4});
      EXPECT_EQ(engine_->OrthogonalizeEarly(), early);
      EXPECT_FALSE(engine_->OrthogonalizeEarly()) << "once";
      Reduce(1, {2, x, 2});
      const auto report = engine_->Commit(Request());
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->newton_schulz_calls, 1);
      EXPECT_EQ(report->groups.at("all").updates, 1);
    }
    digests[early] = Digest();
  }
  EXPECT_EQ(digests[1], digests[0]);
}

// One by one they would take a device longer than all do together.
TEST_P(EngineTest, ADeviceWaitsForMoreMatricesUnlessNoMoreWillCome) {
  spec_.parameters.push_back(
      {.name = "v", .shape = Dims{2, 2}, .group = "all", .role = Role::kHidden});
  routing_ = *RouteParameters(spec_);
  Make(true);
  const bool device = GetParam();
  Reduce(0, {3, 0, 0, 4});
  EXPECT_EQ(engine_->OrthogonalizeEarly(), !device);
  Reduce(1, {2, 2, 2});
  EXPECT_FALSE(engine_->OrthogonalizeEarly());
  Reduce(2, {3, 1, 0, 4});
  EXPECT_TRUE(engine_->OrthogonalizeEarly());
  EXPECT_FALSE(engine_->OrthogonalizeEarly()) << "once";
  const auto report = engine_->Commit(Request());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->newton_schulz_calls, 2);
}

TEST_P(EngineTest, ASkipAfterEarlyOrthogonalizationChangesNoByte) {
  Make(true);
  Reduce(0, {3, 0, 0, 4});
  Reduce(1, {2, 2, 2});
  ASSERT_TRUE(engine_->Commit(Request()).ok());
  const std::string before = Digest();
  Reduce(0, {1, 2, 3, 4});
  ASSERT_TRUE(engine_->OrthogonalizeEarly());
  EXPECT_EQ(Digest(), before) << "momentum is only read";
  // Found too late to prevent the work: the step is skipped.
  EXPECT_EQ(Reduce(1, {2, INFINITY, 2}).nonfinite, 1);
  engine_->Discard();
  EXPECT_EQ(Digest(), before);
  // What was thrown away is not taken for the next step's.
  Reduce(0, {3, 0, 0, 4});
  Reduce(1, {2, 2, 2});
  ASSERT_TRUE(engine_->Commit(Request()).ok());
  const std::string with = Digest();
  Make(false);
  for (int step = 0; step < 2; ++step) {
    Reduce(0, {3, 0, 0, 4});
    Reduce(1, {2, 2, 2});
    ASSERT_TRUE(engine_->Commit(Request()).ok());
  }
  EXPECT_EQ(with, Digest());
}

// Momentum in bf16: ahead of the verdict the same U is made of what would be kept.
TEST_P(EngineTest, AMomentumInBf16IsTheSameWithOverlap) {
  spec_.groups[0].momentum_dtype = Dtype::kBF16;
  std::string digests[2];
  for (const bool early : {false, true}) {
    Make(early);
    EXPECT_EQ(engine_->state_bytes(), 4 * (4 + 2) + 3 * 12);
    for (const float x : {3.0f, -1.0f, 0.3f}) {
      Reduce(0, {x, 0.5f, 2, 4});
      EXPECT_EQ(engine_->OrthogonalizeEarly(), early);
      Reduce(1, {2, x, 2});
      ASSERT_TRUE(engine_->Commit(Request()).ok());
    }
    digests[early] = Digest();
  }
  EXPECT_EQ(digests[1], digests[0]);
}

// 0.05 x 3 = 0.15 is no number of bf16, 0.05 x 4 = 0.2 neither.
TEST_P(EngineTest, AMomentumInBf16HoldsWhatBf16CanHold) {
  spec_.groups[0].momentum_dtype = Dtype::kBF16;
  Make();
  const std::string fresh = Digest("w");
  Reduce(0, {3, 0, 0, 4});
  Reduce(1, {2, 2, 2});
  ASSERT_TRUE(engine_->Commit(Request()).ok());
  const double kept = std::hypot(0.150390625, 0.2001953125);
  EXPECT_NEAR(std::sqrt(engine_->Facts(0).momentum_sum_squares), kept, 1e-12);
  // All state out and in again, and nothing is lost.
  StateCopy copy = engine_->MakeStateCopy();
  ASSERT_TRUE(engine_->CopyState(copy).ok());
  const StateCopy::Tensor& momentum = copy.shards[0].tensors[1];
  EXPECT_EQ(momentum.name, "momentum");
  EXPECT_EQ(momentum.dtype, Dtype::kBF16);
  ASSERT_EQ(momentum.bytes, 8);
  std::uint16_t bits[4];
  std::memcpy(bits, momentum.data, 8);
  EXPECT_EQ(kernels::BF16ToFloat(bits[0]), 0.150390625f);
  EXPECT_EQ(kernels::BF16ToFloat(bits[3]), 0.2001953125f);
  const std::string digest = Digest();
  Make();
  EXPECT_EQ(Digest("w"), fresh);
  ASSERT_TRUE(engine_->RestoreState(copy).ok());
  EXPECT_EQ(Digest(), digest);
  EXPECT_NEAR(std::sqrt(engine_->Facts(0).momentum_sum_squares), kept, 1e-12);
  // One bit of a bf16 momentum is another digest.
  bits[3] ^= 1;
  std::memcpy(momentum.data, bits, 8);
  ASSERT_TRUE(engine_->RestoreState(copy).ok());
  EXPECT_NE(Digest(), digest);
}

// Of a first step's momentum in fp32 as in bf16 the digest is another, even where both hold zeros.
TEST_P(EngineTest, TheDtypeOfTheMomentumIsPartOfTheDigest) {
  Make();
  const std::string fp32 = Digest("w"), adamw = Digest("b");
  spec_.groups[0].momentum_dtype = Dtype::kBF16;
  Make();
  EXPECT_NE(Digest("w"), fp32);
  EXPECT_EQ(Digest("b"), adamw) << "AdamW's moments stay fp32";
}

TEST_P(EngineTest, NothingIsOrthogonalizedForAStepThatWillBeSkipped) {
  Make(true);
  Reduce(1, {2, INFINITY, 2});
  Reduce(0, {3, 0, 0, 4});
  EXPECT_FALSE(engine_->OrthogonalizeEarly());
}

// The hyperparameters that a step is applied with are those of its Begin; others than those that
// the early work was done with make it worthless.
TEST_P(EngineTest, EarlyWorkOnOtherHyperparametersIsDoneAgain) {
  CommitRequest other = Request();
  other.muon["all"].momentum = 0.5;
  std::string digests[2];
  for (const bool early : {false, true}) {
    Make(early);
    Reduce(0, {1, 2, 3, 5});
    EXPECT_EQ(engine_->OrthogonalizeEarly(), early);
    Reduce(1, {2, 2, 2});
    ASSERT_TRUE(engine_->Commit(other).ok());
    digests[early] = Digest();
  }
  EXPECT_EQ(digests[1], digests[0]);
}

TEST_P(EngineTest, AFailedEarlyOrthogonalizationFailsTheCommitAndNoSkip) {
  backend_ = Placed(kernels::MakeCpuBackend({.threads = 1, .newton_schulz_fault = &fault_}));
  Make(true);
  for (const bool commits : {false, true}) {
    ASSERT_TRUE(points_.ArmFromSpec("newton_schulz_fast_path_nan,newton_schulz_fallback_nan").ok());
    Reduce(0, {3, 0, 0, 4});
    ASSERT_TRUE(engine_->OrthogonalizeEarly());
    Reduce(1, {2, 2, 2});
    if (!commits) {
      engine_->Discard();
      continue;
    }
    const auto report = engine_->Commit(Request());
    ASSERT_TRUE(report.ok());
    EXPECT_THAT(report->failure, HasSubstr("\"w\""));
  }
}

}  // namespace
}  // namespace muond
