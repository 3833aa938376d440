#include "client/examples/char_lm/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace muond::char_lm {
namespace {

using ::testing::HasSubstr;

TEST(Comparison, TheBestCandidateIsTheLowestFiniteOne) {
  const double nan = std::nan("");
  EXPECT_EQ(BestCandidate(std::vector<Candidate>{{1, nan}, {2, 3.0}, {3, 2.5}, {4, 2.5}}), 2);
  EXPECT_EQ(BestCandidate(std::vector<Candidate>{{1, nan}, {2, INFINITY}}), -1);
}

TEST(Comparison, SaysWhoIsAheadAndSinceWhen) {
  const std::vector<LossPoint> fast = {{0, 0, 4}, {10, 0, 2.5}, {20, 0, 2.0}, {30, 0, 1.8}};
  const std::vector<LossPoint> slow = {{0, 0, 4}, {10, 0, 3.0}, {20, 0, 2.5}, {30, 0, 2.0}};
  Verdict verdict = Compare(fast, slow);
  EXPECT_EQ(verdict.ahead, Optimizer::kMuon);
  EXPECT_NEAR(verdict.margin, 0.2, 1e-12);
  EXPECT_EQ(verdict.reached_at, 20);
  EXPECT_EQ(verdict.steps, 30);
  EXPECT_EQ(Compare(slow, fast).ahead, Optimizer::kAdamW);
  EXPECT_FALSE(Compare(fast, fast).ahead.has_value());
}

TrainResult GoodRun() {
  TrainResult result;
  result.status.set_muon_matrices(2);
  result.status.set_steps_applied(10);
  result.status.set_newton_schulz_calls(20);
  (*result.status.mutable_steps_skipped())["overflow"] = 1;
  return result;
}

std::string Error(const TrainResult& result) {
  return std::string(CheckMuonRun(result).message());
}

TEST(Comparison, AMuonRunIsProvenByTheDaemonsNumbers) {
  EXPECT_TRUE(CheckMuonRun(GoodRun()).ok());
  TrainResult result = GoodRun();
  result.status.set_newton_schulz_calls(19);
  EXPECT_THAT(Error(result), HasSubstr("expected 20 Newton-Schulz calls (2 matrices x 10"));
  result = GoodRun();
  result.status.set_muon_matrices(0);
  result.status.set_newton_schulz_calls(0);
  EXPECT_THAT(Error(result), HasSubstr("no parameter is trained by Muon"));
  result = GoodRun();
  result.status.set_momentum_nonfinite(1);
  EXPECT_THAT(Error(result), HasSubstr("1 momentum tensors"));
  result = GoodRun();
  result.status.clear_steps_skipped();
  EXPECT_THAT(Error(result), HasSubstr("no step was skipped"));
  result = GoodRun();
  result.unmoved = {"bias.0", "lm_head"};
  EXPECT_THAT(Error(result), HasSubstr("did not move: bias.0, lm_head"));
}

TEST(Comparison, TheScheduleWarmsUpAndEndsAtATenth) {
  EXPECT_NEAR(LearningRate(1.0, 0, 1000), 0.05, 1e-6);
  EXPECT_NEAR(LearningRate(1.0, 19, 1000), 1.0, 1e-2);
  EXPECT_NEAR(LearningRate(1.0, 500, 1000), 0.55, 1e-6);
  EXPECT_NEAR(LearningRate(1.0, 1000, 1000), 0.1, 1e-6);
  EXPECT_NEAR(LearningRate(1.0, 1100, 1000), 0.1, 1e-6);
}

}  // namespace
}  // namespace muond::char_lm
