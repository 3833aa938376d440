// Events of steps: who gets them, what is kept, and what the observer makes of a step.
#include "server/run/step_events.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/run/observe_step.h"

namespace muond {
namespace {

using testing::ElementsAre;

StepEvent Event(const std::string& run, std::int64_t step) {
  StepEvent event{.run = run};
  event.outcome.step = step;
  return event;
}

TEST(StepEvents, ReachThoseWhoAskedForTheRun) {
  StepEvents events;
  std::vector<std::int64_t> all, one;
  events.Subscribe("", [&](const auto& event) { all.push_back(event->outcome.step); });
  const auto subscription =
      events.Subscribe("a", [&](const auto& event) { one.push_back(event->outcome.step); });
  events.Publish(Event("a", 1));
  events.Publish(Event("b", 2));
  events.Unsubscribe(subscription);
  events.Publish(Event("a", 3));
  EXPECT_THAT(all, ElementsAre(1, 2, 3));
  EXPECT_THAT(one, ElementsAre(1));
}

TEST(StepEvents, TellEverybodyWhenNoMoreCome) {
  StepEvents events;
  int ends = 0;
  const auto listener = [&](const std::shared_ptr<const StepEvent>& event) {
    ends += event == nullptr;
  };
  events.Subscribe("", listener);
  events.Close();
  EXPECT_EQ(ends, 1);
  events.Subscribe("", listener);
  EXPECT_EQ(ends, 2) << "who comes late is told at once";
}

TEST(StepEvents, KeepTheListsOfTheLastSampledStep) {
  StepEvents events;
  StepEvent sampled = Event("a", 0);
  sampled.sampled = true;
  sampled.worst_residuals = {{"w", .5}};
  sampled.worst_update_ratios = {{"b", .25}};
  events.Publish(sampled);
  StepEvent plain = Event("a", 1);
  plain.worst_update_ratios = {{"w", .125}};
  plain.largest_gradients = {{"w", 3}};
  events.Publish(plain);
  const auto last = events.Last("a");
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].outcome.step, 1);
  EXPECT_EQ(last[0].worst_residuals[0].value, .5);
  EXPECT_EQ(last[0].worst_update_ratios[0].parameter, "b") << "a sample has AdamW's, too";
  EXPECT_EQ(last[0].largest_gradients[0].value, 3);
  events.Forget("a");
  EXPECT_TRUE(events.Last("").empty());
}

class StepObserverTest : public testing::Test {
 protected:
  StepObserverTest() {
    run_metrics_ = metrics_.OpenRun({.run = "r", .groups = {"g"}});
    events_.Subscribe("", [this](const auto& event) { seen_.push_back(*event); });
    observer_ = std::make_unique<StepObserver>(
        spec_, ObserveOptions{.daemon = "d", .events = &events_, .diagnostics_every = 10},
        run_metrics_.get(), &metrics_);
  }
  static absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }
  void End(std::int64_t step, absl::Time now) {
    StepOutcome outcome;
    outcome.step = step;
    outcome.applied = true;
    observer_->OnOutcome(outcome, RunMetrics::ScaleMove::kGrowth, now, {{"g", {.lr = .5}}},
                         {{"g", {.lr = .25}}});
  }

  RunSpec spec_{.name = "r",
                .parameters = {{.name = "w", .shape = Dims{2, 2}, .group = "g"}},
                .groups = {{.name = "g"}}};
  DaemonMetrics metrics_{BuildInfo{}};
  StepEvents events_;
  std::vector<StepEvent> seen_;
  std::unique_ptr<RunMetrics> run_metrics_;
  std::unique_ptr<StepObserver> observer_;
};

TEST_F(StepObserverTest, MakesAnEventOfAStep) {
  observer_->OnBegin(At(10));
  observer_->OnBegin(At(11));  // another rank's
  observer_->OnReduced({.seconds = .5, .device = 1});
  observer_->OnVote(At(12));
  observer_->OnVerdict(At(12.25));
  CommitReport report;
  report.diagnostics.sampled = true;
  report.diagnostics.residuals = {{.75, 0}};
  report.diagnostics.groups["g"].residuals = {.75};
  report.diagnostics.stale = 2;
  report.diagnostics.spans = {SpanUntilNow("momentum", 0, .125)};
  observer_->OnCommitted(report);
  End(7, At(13));
  ASSERT_EQ(seen_.size(), 1u);
  const StepEvent& event = seen_[0];
  EXPECT_EQ(event.daemon, "d");
  EXPECT_EQ(event.begin_seconds, 10);
  EXPECT_EQ(event.end_seconds, 13);
  EXPECT_EQ(event.scale_change, 1);
  EXPECT_EQ(event.worst_residuals[0].parameter, "w");
  EXPECT_EQ(event.learning_rates.at("g"), .5);
  std::vector<std::string> phases;
  for (const PhaseSpan& span : event.phases) phases.emplace_back(span.phase);
  EXPECT_THAT(phases, ElementsAre("reduce", "receive", "vote", "momentum"));
  EXPECT_EQ(event.phases[1].seconds, 2);
  EXPECT_EQ(event.phases[2].seconds, .25);
  const std::string text = metrics_.Serialize();
  EXPECT_NE(text.find("muond_momentum_stale_tensors{run=\"r\"} 2\n"), std::string::npos);
  EXPECT_NE(text.find("muond_shard_busy_seconds_total{run=\"r\"} 0.625\n"), std::string::npos);
  EXPECT_NE(text.find("measure=\"newton_schulz_residual\",rank=\"1\",run=\"r\"} 0.75\n"),
            std::string::npos);
}

TEST_F(StepObserverTest, AStepThatWasThrownAwayLeavesNothingToTheNext) {
  observer_->OnBegin(At(10));
  observer_->OnReduced({.seconds = .5});
  observer_->OnAbandoned();
  End(7, At(13));
  EXPECT_EQ(seen_[0].begin_seconds, 0);
  EXPECT_TRUE(seen_[0].phases.empty());
}

TEST_F(StepObserverTest, SamplesEveryNthStep) {
  EXPECT_TRUE(observer_->Samples(0));
  EXPECT_FALSE(observer_->Samples(9));
  EXPECT_TRUE(observer_->Samples(10));
  const StepObserver never(spec_, {.diagnostics_every = 0}, run_metrics_.get(), &metrics_);
  EXPECT_FALSE(never.Samples(0));
}

TEST_F(StepObserverTest, ForgetsTheRunWithItself) {
  End(0, At(1));
  EXPECT_EQ(events_.Last("r").size(), 1u);
  observer_.reset();
  EXPECT_TRUE(events_.Last("r").empty());
}

}  // namespace
}  // namespace muond
