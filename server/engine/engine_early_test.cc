// Newton-Schulz ahead of the commit, and a momentum that is kept in bf16.
#include <cmath>
#include <cstring>
#include <limits>

#include "gmock/gmock.h"
#include "server/engine/engine_for_test.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

class EarlyTest : public EngineTest {};
INSTANTIATE_TEST_SUITE_P(Memory, EarlyTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Device" : "Host"; });

// Two steps, so that momentum counts: what state is after it, and what was counted.
TEST_P(EarlyTest, EarlyOrthogonalizationGivesTheSameBits) {
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
TEST_P(EarlyTest, ADeviceWaitsForMoreMatricesUnlessNoMoreWillCome) {
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

TEST_P(EarlyTest, ASkipAfterEarlyOrthogonalizationChangesNoByte) {
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
TEST_P(EarlyTest, AMomentumInBf16IsTheSameWithOverlap) {
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
TEST_P(EarlyTest, AMomentumInBf16HoldsWhatBf16CanHold) {
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
TEST_P(EarlyTest, TheDtypeOfTheMomentumIsPartOfTheDigest) {
  Make();
  const std::string fp32 = Digest("w"), adamw = Digest("b");
  spec_.groups[0].momentum_dtype = Dtype::kBF16;
  Make();
  EXPECT_NE(Digest("w"), fp32);
  EXPECT_EQ(Digest("b"), adamw) << "AdamW's moments stay fp32";
}

TEST_P(EarlyTest, NothingIsOrthogonalizedForAStepThatWillBeSkipped) {
  Make(true);
  Reduce(1, {2, INFINITY, 2});
  Reduce(0, {3, 0, 0, 4});
  EXPECT_FALSE(engine_->OrthogonalizeEarly());
}

// The hyperparameters that a step is applied with are those of its Begin; others than those that
// the early work was done with make it worthless.
TEST_P(EarlyTest, EarlyWorkOnOtherHyperparametersIsDoneAgain) {
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

TEST_P(EarlyTest, AFailedEarlyOrthogonalizationFailsTheCommitAndNoSkip) {
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
