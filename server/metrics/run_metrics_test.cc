#include "server/metrics/run_metrics.h"

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/daemon_metrics.h"
#include "server/metrics/exposition_for_test.h"

namespace muond {
namespace {

using testing::Contains;
using testing::Key;
using testing::Not;
using testing::Pair;
using Samples = std::map<std::string, double>;

StepOutcome Applied(std::int64_t step) {
  StepOutcome outcome;
  outcome.step = step;
  outcome.applied = true;
  return outcome;
}

StepOutcome Skipped(std::int64_t step, SkipCause cause) {
  StepOutcome outcome;
  outcome.step = step;
  outcome.cause = cause;
  return outcome;
}

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

class RunMetricsTest : public testing::Test {
 protected:
  RunMetrics::Opening Opening(std::string run = "r") {
    return {.run = std::move(run),
            .groups = {"hidden", "rest"},
            .trainers_expected = 2,
            .muon_expected = true,
            .loss_scale = 65536,
            .loss_scale_min = 1,
            .opened = At(1000)};
  }
  Samples Scrape() { return ParseExposition(daemon_.Serialize()); }

  DaemonMetrics daemon_{{"0.1.0", "abc", "none", "g++ 12"}};
};

TEST_F(RunMetricsTest, ExportsEveryCounterAsZeroWhenTheRunOpens) {
  const auto run = daemon_.OpenRun(Opening());
  const Samples samples = Scrape();
  for (const char* outcome : {"applied", "skipped_overflow", "skipped_state_overflow",
                              "skipped_norm_threshold", "skipped_by_trainer", "failed"}) {
    EXPECT_THAT(
        samples,
        Contains(Pair(absl::StrFormat("muond_steps_total{outcome=\"%s\",run=\"r\"}", outcome), 0)));
  }
  for (const char* outcome : {"ok", "low_rank", "diverged", "nonfinite"}) {
    for (const char* group : {"hidden", "rest"}) {
      EXPECT_THAT(
          samples,
          Contains(
              Pair(absl::StrFormat(
                       "muond_newton_schulz_outcomes_total{group=\"%s\",outcome=\"%s\",run=\"r\"}",
                       group, outcome),
                   0)));
    }
  }
  for (const auto& [series, value] : samples) {
    if (series.find("run=\"r\"") != std::string::npos &&
        series.find("_total") != std::string::npos) {
      EXPECT_EQ(value, 0) << series;
    }
  }
}

TEST_F(RunMetricsTest, EveryRunMetricOfTheTableIsExportedForAnOpenRun) {
  const auto run = daemon_.OpenRun(Opening());
  const std::string text = daemon_.Serialize();
  for (const MetricRow& row : MetricTable()) {
    if (row.labels.empty() || row.labels[0].name != "run") continue;
    EXPECT_NE(text.find(absl::StrFormat("# TYPE %s %s\n", row.name, MetricTypeName(row.type))),
              std::string::npos)
        << row.name;
  }
}

TEST_F(RunMetricsTest, LeavesNothingBehindWhenTheRunCloses) {
  const Samples before = Scrape();
  auto run = daemon_.OpenRun(Opening());
  run->OnOutcome(Applied(0), RunMetrics::ScaleMove::kNone, At(1001));
  EXPECT_GT(Scrape().size(), before.size());
  run.reset();
  const Samples after = Scrape();
  EXPECT_EQ(after.size(), before.size());
  for (const auto& [series, value] : after) EXPECT_EQ(series.find("run=\""), std::string::npos);
}

TEST_F(RunMetricsTest, CountsEachOutcomeUnderItsCause) {
  const auto run = daemon_.OpenRun(Opening());
  using Move = RunMetrics::ScaleMove;
  StepOutcome clipped = Applied(0);
  clipped.next_loss_scale = 131072;
  clipped.grad_norm = 3.5;
  clipped.clip_coefficient = 0.5;
  run->OnOutcome(clipped, Move::kGrowth, At(1001));
  StepOutcome overflow = Skipped(1, SkipCause::kOverflow);
  overflow.next_loss_scale = 65536;
  overflow.consecutive_skips = 1;
  overflow.nonfinite_elements = 7;
  run->OnOutcome(overflow, Move::kBackoff, At(1002));
  Samples samples = Scrape();
  EXPECT_EQ(samples["muond_steps_total{outcome=\"applied\",run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_steps_total{outcome=\"skipped_overflow\",run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_last_step{run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_last_step_timestamp_seconds{run=\"r\"}"], 1002);
  EXPECT_EQ(samples["muond_loss_scale{run=\"r\"}"], 65536);
  EXPECT_EQ(samples["muond_loss_scale_changes_total{direction=\"growth\",run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_loss_scale_changes_total{direction=\"backoff\",run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_nonfinite_elements_total{kind=\"grad\",run=\"r\"}"], 7);
  EXPECT_EQ(samples["muond_consecutive_skips{run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_grad_clipped_steps_total{run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_grad_norm{run=\"r\"}"], 3.5) << "an overflow has no norm to report";

  run->OnOutcome(Skipped(2, SkipCause::kStateOverflow), Move::kNone, At(1003));
  StepOutcome threshold = Skipped(3, SkipCause::kNormThreshold);
  threshold.grad_norm = 50;
  run->OnOutcome(threshold, Move::kNone, At(1004));
  run->OnOutcome(Skipped(4, SkipCause::kTrainer), Move::kNone, At(1005));
  run->OnStepFailed(At(1006));
  samples = Scrape();
  for (const char* outcome :
       {"skipped_state_overflow", "skipped_norm_threshold", "skipped_by_trainer", "failed"}) {
    EXPECT_EQ(samples[absl::StrFormat("muond_steps_total{outcome=\"%s\",run=\"r\"}", outcome)], 1);
  }
  EXPECT_EQ(samples["muond_grad_norm{run=\"r\"}"], 50);
}

TEST_F(RunMetricsTest, ShowsTheStepInFlightFromItsBeginToItsEnd) {
  const auto run = daemon_.OpenRun(Opening());
  EXPECT_EQ(Scrape()["muond_last_step_timestamp_seconds{run=\"r\"}"], 1000)
      << "a run that never stepped counts from its opening";
  run->OnStepBegin(At(1010));
  run->OnStepBegin(At(1011));  // another rank's Begin
  run->SetWaitingShards(3);
  Samples samples = Scrape();
  EXPECT_EQ(samples["muond_step_inflight{run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_step_inflight_start_timestamp_seconds{run=\"r\"}"], 1010);
  EXPECT_EQ(samples["muond_step_waiting_shards{run=\"r\"}"], 3);

  run->OnOutcome(Applied(0), RunMetrics::ScaleMove::kNone, At(1012.5));
  samples = Scrape();
  EXPECT_EQ(samples["muond_step_inflight{run=\"r\"}"], 0);
  EXPECT_EQ(samples["muond_step_waiting_shards{run=\"r\"}"], 0);
  EXPECT_EQ(samples["muond_step_duration_seconds_sum{run=\"r\"}"], 2.5);
  EXPECT_EQ(samples["muond_step_duration_seconds_count{run=\"r\"}"], 1);

  run->OnStepBegin(At(1020));
  run->OnStepAbandoned();
  samples = Scrape();
  EXPECT_EQ(samples["muond_step_inflight{run=\"r\"}"], 0);
  EXPECT_EQ(samples["muond_step_duration_seconds_count{run=\"r\"}"], 1);
}

TEST_F(RunMetricsTest, IsInExactlyOneState) {
  const auto run = daemon_.OpenRun(Opening());
  for (const auto state : {RunMetrics::State::kRunning, RunMetrics::State::kFailed}) {
    run->SetState(state);
    double sum = 0;
    for (const auto& [series, value] : Scrape()) {
      if (series.starts_with("muond_run_state{")) sum += value;
    }
    EXPECT_EQ(sum, 1);
  }
  EXPECT_EQ(Scrape()["muond_run_state{run=\"r\",state=\"failed\"}"], 1);
}

TEST_F(RunMetricsTest, NewtonSchulzOutcomesSumToTheCalls) {
  const auto run = daemon_.OpenRun(Opening());
  run->OnGroupCommit(0, {.calls = 20,
                         .zero_inputs = 1,
                         .fallbacks = 9,
                         .low_rank = 2,
                         .diverged = 3,
                         .nonfinite = 4,
                         .updates = 19});
  run->OnGroupCommit(0, {.calls = 10, .fallbacks = 1, .diverged = 1, .updates = 10});
  const Samples samples = Scrape();
  const auto sample = [&](const std::string& rest) {
    return samples.at(absl::StrFormat("muond_newton_schulz_%s,run=\"r\"}", rest));
  };
  const std::map<std::string, double> outcomes = {
      {"ok", 20}, {"low_rank", 2}, {"diverged", 4}, {"nonfinite", 4}};
  double sum = 0;
  for (const auto& [outcome, count] : outcomes) {
    const double exported =
        sample(absl::StrFormat("outcomes_total{group=\"hidden\",outcome=\"%s\"", outcome));
    EXPECT_EQ(exported, count) << outcome;
    sum += exported;
  }
  EXPECT_EQ(sample("calls_total{group=\"hidden\""), 30);
  EXPECT_EQ(sum, 30);
  EXPECT_EQ(sample("special_total{group=\"hidden\",kind=\"zero_input\""), 1);
  EXPECT_EQ(sample("special_total{group=\"hidden\",kind=\"fallback\""), 10);
  EXPECT_EQ(samples.at("muond_muon_updates_total{group=\"hidden\",run=\"r\"}"), 29);
  EXPECT_EQ(samples.at("muond_newton_schulz_calls_total{group=\"rest\",run=\"r\"}"), 0);
}

TEST_F(RunMetricsTest, RefusesMoreBadOutcomesThanCalls) {
  const auto run = daemon_.OpenRun(Opening());
  EXPECT_DEATH(run->OnGroupCommit(0, {.calls = 1, .low_rank = 1, .diverged = 1}),
               "more bad outcomes than calls");
}

TEST_F(RunMetricsTest, NeverExportsANonFiniteGauge) {
  const auto run = daemon_.OpenRun(Opening());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  run->SetNorms(std::vector<RunMetrics::GroupNorms>{{3, 4}, {5, 6}});
  run->SetNorms(std::vector<RunMetrics::GroupNorms>{{nan, inf}, {7, 8}});
  run->SetLearningRate(0, nan);
  StepOutcome outcome = Applied(0);
  outcome.next_loss_scale = inf;
  outcome.grad_norm = nan;
  run->OnOutcome(outcome, RunMetrics::ScaleMove::kNone, At(1));
  Samples samples = Scrape();
  for (const auto& [series, value] : samples) EXPECT_TRUE(std::isfinite(value)) << series;
  EXPECT_EQ(samples["muond_momentum_norm{group=\"hidden\",run=\"r\"}"], 3);
  EXPECT_EQ(samples["muond_momentum_norm{group=\"rest\",run=\"r\"}"], 7);
}

TEST_F(RunMetricsTest, ObservesEachValueInItsBucket) {
  const auto run = daemon_.OpenRun(Opening());
  const std::vector<double> cosines = {-1, -0.95, 0, 0.96}, ratios = {1e-3, 2}, residuals = {0.36};
  run->ObserveMeasures(1, {.cosines = cosines, .update_ratios = ratios, .residuals = residuals});
  run->ObserveMeasures(1, {.residuals = residuals});
  Samples samples = Scrape();
  const auto sample = [&](const char* name, const char* part, const char* le) {
    return samples[absl::StrFormat("muond_%s_%s{group=\"rest\",run=\"r\"%s}", name, part, le)];
  };
  EXPECT_EQ(sample("momentum_grad_cosine", "bucket", ",le=\"-0.95\""), 2) << "bounds belong below";
  EXPECT_EQ(sample("momentum_grad_cosine", "bucket", ",le=\"0.05\""), 3);
  EXPECT_EQ(sample("momentum_grad_cosine", "count", ""), 4);
  EXPECT_NEAR(sample("momentum_grad_cosine", "sum", ""), -0.99, 1e-12);
  EXPECT_EQ(sample("update_rms_ratio", "bucket", ",le=\"0.001\""), 1);
  EXPECT_EQ(sample("update_rms_ratio", "bucket", ",le=\"+Inf\""), 2);
  EXPECT_EQ(sample("newton_schulz_residual", "bucket", ",le=\"0.35\""), 0);
  EXPECT_EQ(sample("newton_schulz_residual", "bucket", ",le=\"0.45\""), 2);
}

TEST_F(RunMetricsTest, RanksTheWorstValues) {
  const auto run = daemon_.OpenRun(Opening());
  run->SetWorst(RunMetrics::Measure::kUpdateRatio, std::vector<double>{.5, .25});
  run->SetStaleTensors(3);
  run->SetShardElements(1000);
  run->AddBusySeconds(1.5);
  run->AddBusySeconds(-1);
  Samples samples = Scrape();
  const auto worst = [&](int rank) {
    return samples[absl::StrFormat(
        "muond_worst_value{measure=\"update_rms_ratio\",rank=\"%d\",run=\"r\"}", rank)];
  };
  EXPECT_EQ(worst(1), .5);
  EXPECT_EQ(worst(2), .25);
  EXPECT_EQ(worst(3), 0);
  EXPECT_EQ(samples["muond_momentum_stale_tensors{run=\"r\"}"], 3);
  EXPECT_EQ(samples["muond_shard_elements{run=\"r\"}"], 1000);
  EXPECT_EQ(samples["muond_shard_busy_seconds_total{run=\"r\"}"], 1.5);
}

TEST_F(RunMetricsTest, HasALossScaleFloorOnlyWhereThereIsOne) {
  RunMetrics::Opening opening = Opening();
  opening.loss_scale_min = 0;
  const auto run = daemon_.OpenRun(opening);
  EXPECT_THAT(Scrape(), Not(Contains(Key("muond_loss_scale_min{run=\"r\"}"))));
}

// A run reopened under its name while the old one is still being torn down keeps its series.
TEST_F(RunMetricsTest, SurvivesTheEndOfAnotherRunOfTheSameName) {
  auto old_run = daemon_.OpenRun(Opening());
  const auto new_run = daemon_.OpenRun(Opening());
  old_run.reset();
  new_run->SetState(RunMetrics::State::kRunning);
  EXPECT_EQ(Scrape()["muond_run_state{run=\"r\",state=\"running\"}"], 1);
}

// AddressSanitizer is the judge: the run's series must not refer to what went with the daemon's.
// What it writes to is its own as well as the daemon's, and goes with the last of them.
TEST_F(RunMetricsTest, MayOutliveTheDaemonsMetrics) {
  auto daemon = std::make_unique<DaemonMetrics>(BuildInfo{});
  const auto of_daemon = daemon->OpenRun(Opening());
  daemon.reset();
  of_daemon->SetState(RunMetrics::State::kDraining);

  auto families = std::make_shared<MetricFamilies>();
  const std::weak_ptr<MetricFamilies> kept = families;
  auto run = std::make_unique<RunMetrics>(std::move(families), Opening());
  ASSERT_FALSE(kept.expired());
  run->SetState(RunMetrics::State::kDraining);
  double draining = 0, series = 0;
  for (const auto& family : kept.lock()->registry().Collect()) {
    if (family.name != "muond_run_state") continue;
    for (const auto& metric : family.metric) {
      series += 1;
      for (const auto& label : metric.label) {
        if (label.name == "state" && label.value == "draining") draining = metric.gauge.value;
      }
    }
  }
  EXPECT_EQ(series, 6);
  EXPECT_EQ(draining, 1);
  run.reset();
  EXPECT_TRUE(kept.expired());
}

TEST_F(RunMetricsTest, SumsTheGroupsBeyondTheLimitInOneSlot) {
  RunMetrics::Opening opening = Opening();
  opening.groups.clear();
  for (int i = 0; i < 1000; ++i) opening.groups.push_back(absl::StrFormat("g%d", i));
  const auto run = daemon_.OpenRun(opening);
  run->SetParameters(
      std::vector<RunMetrics::GroupParameters>(1000, {.muon = 1, .muon_elements = 4}));
  run->SetNorms(std::vector<RunMetrics::GroupNorms>(1000, {.momentum = 2, .weight = 0}));
  run->SetLearningRate(999, 0.1);
  run->OnGroupCommit(999, {.calls = 1, .updates = 1});
  Samples samples = Scrape();
  EXPECT_EQ(samples["muond_parameters{algorithm=\"muon\",group=\"g14\",run=\"r\"}"], 1);
  EXPECT_EQ(samples["muond_parameters{algorithm=\"muon\",group=\"(other)\",run=\"r\"}"], 985);
  EXPECT_NEAR(samples["muond_momentum_norm{group=\"(other)\",run=\"r\"}"], 2 * std::sqrt(985),
              1e-9);
  EXPECT_EQ(samples["muond_newton_schulz_calls_total{group=\"(other)\",run=\"r\"}"], 1);
  EXPECT_THAT(samples, Not(Contains(Key("muond_learning_rate{group=\"(other)\",run=\"r\"}"))));
  EXPECT_THAT(samples,
              Not(Contains(Key("muond_parameters{algorithm=\"muon\",group=\"g15\",run=\"r\"}"))));
}

}  // namespace
}  // namespace muond
