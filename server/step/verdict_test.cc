#include "server/step/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::ElementsAre;

Vote VoteOf(const std::vector<double>& sums) {
  Vote vote;
  for (const double sum : sums) vote.sum_squares.Add(sum);
  return vote;
}

Verdict DecideOne(const VerdictRules& rules, const Vote& vote) { return Decide(rules, {&vote, 1}); }

TEST(Verdict, AppliesAFiniteStepWithItsNorm) {
  const Verdict verdict = DecideOne({}, VoteOf({9, 16}));
  EXPECT_TRUE(verdict.apply);
  EXPECT_EQ(verdict.cause, SkipCause::kNone);
  EXPECT_EQ(verdict.grad_norm, 5.0);
  EXPECT_EQ(verdict.clip_coefficient, 1.0);
}

TEST(Verdict, ClipsToTheGlobalNormOfAllDaemons) {
  const Vote votes[] = {VoteOf({9}), VoteOf({16})};
  const Verdict verdict = Decide({.max_grad_norm = 1}, votes);
  EXPECT_TRUE(verdict.apply);
  EXPECT_EQ(verdict.grad_norm, 5.0);
  EXPECT_EQ(verdict.clip_coefficient, 1.0 / (5.0 + 1e-6));
}

TEST(Verdict, NeverScalesUp) {
  EXPECT_EQ(DecideOne({.max_grad_norm = 10}, VoteOf({25})).clip_coefficient, 1.0);
}

TEST(Verdict, PaddlePaddle32038_ZeroNormIsNotClipped) {
  const Verdict verdict = DecideOne({.max_grad_norm = 1e-9}, VoteOf({0}));
  EXPECT_TRUE(verdict.apply);
  EXPECT_EQ(verdict.grad_norm, 0.0);
  EXPECT_EQ(verdict.clip_coefficient, 1.0);
}

TEST(Verdict, PyTorch46849_NormBeyondFp32ClipsInsteadOfZeroing) {
  // Four elements of 2e19: the sum of squares is infinite in fp32.
  const double sum = 4 * 2e19 * 2e19;
  ASSERT_GT(sum, static_cast<double>(std::numeric_limits<float>::max()));
  const Verdict verdict = DecideOne({.max_grad_norm = 1}, VoteOf({sum}));
  EXPECT_TRUE(verdict.apply);
  EXPECT_DOUBLE_EQ(verdict.grad_norm, 4e19);
  EXPECT_DOUBLE_EQ(verdict.clip_coefficient, 1 / 4e19);
  EXPECT_GT(verdict.clip_coefficient, 0.0);
}

TEST(Verdict, LargestFiniteGradientsKeepAFiniteNorm) {
  // 2^40 elements of the largest fp32 number.
  const double largest = std::numeric_limits<float>::max();
  const Verdict verdict = DecideOne({.max_grad_norm = 1}, VoteOf({0x1p40 * largest * largest}));
  EXPECT_TRUE(verdict.apply);
  EXPECT_TRUE(std::isfinite(verdict.grad_norm));
  EXPECT_GT(verdict.clip_coefficient, 0.0);
}

TEST(Verdict, ANonFiniteElementAnywhereSkipsAsOverflow) {
  Vote bad = VoteOf({});
  bad.nonfinite = 3;
  bad.offenders = {"b"};
  const Vote votes[] = {VoteOf({9}), bad};
  const Verdict verdict = Decide({.max_grad_norm = 1}, votes);
  EXPECT_FALSE(verdict.apply);
  EXPECT_EQ(verdict.cause, SkipCause::kOverflow);
  EXPECT_EQ(verdict.nonfinite, 3);
  EXPECT_EQ(verdict.grad_norm, 0.0) << "a norm that is not finite is reported as 0";
  EXPECT_EQ(verdict.clip_coefficient, 1.0);
  EXPECT_THAT(verdict.offenders, ElementsAre("b"));
}

TEST(Verdict, StateOverflowSkips) {
  Vote vote = VoteOf({9});
  vote.state_overflows = 1;
  const Verdict verdict = DecideOne({}, vote);
  EXPECT_EQ(verdict.cause, SkipCause::kStateOverflow);
  EXPECT_EQ(verdict.grad_norm, 3.0);
}

TEST(Verdict, MegatronLM3460_NormThresholdSkips) {
  const VerdictRules rules{.max_grad_norm = 1, .grad_norm_skip_threshold = 10};
  const Verdict verdict = DecideOne(rules, VoteOf({2500}));
  EXPECT_FALSE(verdict.apply);
  EXPECT_EQ(verdict.cause, SkipCause::kNormThreshold);
  EXPECT_EQ(verdict.grad_norm, 50.0);
  EXPECT_EQ(verdict.clip_coefficient, 1.0);
  EXPECT_TRUE(DecideOne(rules, VoteOf({100})).apply) << "the threshold itself passes";
}

TEST(Verdict, CausesRank) {
  Vote vote = VoteOf({2500});
  const VerdictRules rules{.grad_norm_skip_threshold = 10};
  EXPECT_EQ(DecideOne(rules, vote).cause, SkipCause::kNormThreshold);
  vote.state_overflows = 1;
  EXPECT_EQ(DecideOne(rules, vote).cause, SkipCause::kStateOverflow);
  vote.nonfinite = 1;
  EXPECT_EQ(DecideOne(rules, vote).cause, SkipCause::kOverflow);
  vote.trainer_skip = SkipCause::kTrainer;
  EXPECT_EQ(DecideOne(rules, vote).cause, SkipCause::kTrainer);
}

TEST(Verdict, SameForEveryOrderOfVotes) {
  std::vector<Vote> votes(4);
  for (int i = 0; i < 4; ++i) {
    votes[i].sum_squares.Add(std::ldexp(1.0, -30 * i));
    votes[i].sum_squares.Add(0.1 * i);
    votes[i].offenders = {std::string(1, static_cast<char>('d' - i)), "a"};
  }
  const auto verdict_of = [&](const std::vector<int>& order) {
    std::vector<Vote> ordered;
    for (const int i : order) ordered.push_back(votes[i]);
    return Decide({.max_grad_norm = 0.5}, ordered);
  };
  std::vector<int> order = {0, 1, 2, 3};
  const Verdict first = verdict_of(order);
  EXPECT_THAT(first.offenders, ElementsAre("a", "b", "c", "d"));
  while (std::next_permutation(order.begin(), order.end())) EXPECT_EQ(verdict_of(order), first);
}

TEST(ValidateVerdictRules, RefusesWhatWouldFlipOrPoisonAStepByName) {
  EXPECT_TRUE(ValidateVerdictRules({}).ok());
  EXPECT_TRUE(ValidateVerdictRules({.max_grad_norm = 1, .grad_norm_skip_threshold = 2}).ok());
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const absl::Status clip = ValidateVerdictRules({.max_grad_norm = bad});
    EXPECT_EQ(clip.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(clip.message()), ::testing::HasSubstr("\"max_grad_norm\""));
    const absl::Status skip = ValidateVerdictRules({.grad_norm_skip_threshold = bad});
    EXPECT_EQ(skip.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(skip.message()), ::testing::HasSubstr("grad_norm_skip_threshold"));
  }
}

TEST(VerdictDeathTest, VotesOfTwoStepsAreAnError) {
  std::vector<Vote> votes(2);
  votes[1].step = 1;
  EXPECT_DEATH(Decide({}, votes), "one step");
}

}  // namespace
}  // namespace muond
