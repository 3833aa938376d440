// Whatever the order in which the ranks' calls and the engine's answers come in, the outcomes, what
// is reduced and what is committed are the same; so are they when calls are repeated.
#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {
namespace {

struct Event {
  enum class Kind { kBegin, kPush, kFinish, kSkip } kind;
  std::int64_t rank;
  SliceId slice;
};

// What must not depend on the order.
struct Result {
  std::vector<StepOutcome> outcomes;
  std::vector<std::string> reduces, commits, replies;
  friend bool operator==(const Result&, const Result&) = default;
};

std::string Text(const ReduceEffect& effect) {
  std::string text = std::to_string(effect.state) + "/" + std::to_string(effect.divisor);
  for (const Layer& layer : effect.layers) {
    text += " " + std::to_string(layer.micro_batch) + "." + std::to_string(layer.rank) + "." +
            std::to_string(layer.parameter);
  }
  return text;
}

std::string Text(const CommitEffect& effect) {
  std::string text = std::to_string(effect.step) + "*" + std::to_string(effect.clip_coefficient);
  for (const int p : effect.absent) text += " -" + std::to_string(p);
  for (const auto& [group, values] : effect.muon) text += group + std::to_string(values.lr);
  return text;
}

// One step in which each rank begins, pushes all but what it names absent, and finishes.
struct Scenario {
  std::map<std::int64_t, std::vector<std::string>> absent;
  std::map<int, GradientFacts> facts;
  bool skip = false;
};

std::vector<Event> EventsOf(const MachineDriver& d, const Scenario& scenario) {
  std::vector<Event> events;
  for (std::int64_t rank = 0; rank < d.layout.world_size; ++rank) {
    if (scenario.skip) {
      events.push_back({Event::Kind::kSkip, rank, {}});
      continue;
    }
    events.push_back({Event::Kind::kBegin, rank, {}});
    const auto absent = scenario.absent.find(rank);
    for (const SliceId& id : d.SlicesOf(rank)) {
      const std::string& name = d.layout.parameters[id.parameter].name;
      if (absent != scenario.absent.end() &&
          std::find(absent->second.begin(), absent->second.end(), name) != absent->second.end()) {
        continue;
      }
      events.push_back({Event::Kind::kPush, rank, id});
    }
    events.push_back({Event::Kind::kFinish, rank, {}});
  }
  return events;
}

// A rank begins before it pushes or finishes; everything else is free.
bool Legal(const std::vector<Event>& events) {
  std::set<std::int64_t> begun;
  for (const Event& event : events) {
    if (event.kind == Event::Kind::kBegin) begun.insert(event.rank);
    if (event.kind == Event::Kind::kSkip || begun.contains(event.rank)) continue;
    return false;
  }
  return true;
}

// Moves each rank's Begin before its other calls.
void MakeLegal(std::vector<Event>& events) {
  for (auto begin = events.begin(); begin != events.end(); ++begin) {
    if (begin->kind != Event::Kind::kBegin) continue;
    const auto first = std::find_if(events.begin(), begin,
                                    [&](const Event& event) { return event.rank == begin->rank; });
    if (first != begin) std::rotate(first, begin, begin + 1);
  }
}

// What happens between two events.
using Between = std::function<void(MachineDriver&)>;

void RunStep(MachineDriver& d, const Scenario& scenario, const std::vector<Event>& events,
             const Between& between, std::map<std::uint64_t, std::int64_t>& ranks_of_waiters) {
  d.facts = scenario.facts;
  const std::int64_t step = d.machine.next_step();
  StepBegin begin = d.NextBegin();
  begin.muon["g"].lr = 0.5 / static_cast<double>(step + 1);
  for (const Event& event : events) {
    switch (event.kind) {
      case Event::Kind::kBegin:
        ASSERT_TRUE(d.Begin(event.rank, begin).ok());
        break;
      case Event::Kind::kPush:
        ASSERT_TRUE(d.PushAt(step, event.slice).ok());
        break;
      case Event::Kind::kFinish: {
        const auto absent = scenario.absent.find(event.rank);
        ranks_of_waiters[d.FinishAt(step, event.rank,
                                    absent == scenario.absent.end() ? std::vector<std::string>{}
                                                                    : absent->second)] = event.rank;
        break;
      }
      case Event::Kind::kSkip:
        ranks_of_waiters[d.SkipAt(step, event.rank)] = event.rank;
        break;
    }
    between(d);
  }
  while (!d.open_reductions.empty()) d.Reduce();
  if (d.commit_open) d.Commit();
  ASSERT_EQ(d.machine.next_step(), step + 1) << "every complete step ends";
}

Result ResultOf(const MachineDriver& d, const std::map<std::uint64_t, std::int64_t>& waiters) {
  Result result;
  for (const OutcomeEffect& effect : d.outcomes) result.outcomes.push_back(effect.outcome);
  for (const ReduceEffect& effect : d.reduces) result.reduces.push_back(Text(effect));
  for (const CommitEffect& effect : d.commits) result.commits.push_back(Text(effect));
  std::set<std::string> replies;  // a rank that asked twice got the same answer twice
  for (const auto& [waiter, rank] : waiters) {
    const StepOutcome outcome = d.Outcome(waiter);
    EXPECT_EQ(outcome, result.outcomes.at(outcome.step));
    replies.insert(std::to_string(outcome.step) + " to " + std::to_string(rank));
  }
  result.replies.assign(replies.begin(), replies.end());
  std::sort(result.reduces.begin(), result.reduces.end());
  return result;
}

TEST(StepMachineOrder, EveryOrderOfASmallStepEndsAlike) {
  const Scenario scenario;
  MachineDriver model(OneParameter(2));
  const std::vector<Event> events = EventsOf(model, scenario);
  ASSERT_EQ(events.size(), 6u);
  std::vector<int> order = {0, 1, 2, 3, 4, 5};
  std::optional<Result> first;
  int legal = 0;
  do {
    std::vector<Event> ordered;
    for (const int i : order) ordered.push_back(events[i]);
    if (!Legal(ordered)) continue;
    ++legal;
    MachineDriver d(OneParameter(2));
    std::map<std::uint64_t, std::int64_t> waiters;
    RunStep(
        d, scenario, ordered, [](MachineDriver&) {}, waiters);
    const Result result = ResultOf(d, waiters);
    if (!first) first = result;
    ASSERT_EQ(result, *first);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(legal, 80) << "720 orders, each rank's Begin first of three";
  EXPECT_TRUE(first->outcomes.at(0).applied);
}

// Sliced, replicated and tied parameters, one on some ranks only, one without elements.
StepLayout Large() {
  return {3,
          {Sliced("a", 0, {2, 1, 0}), Replicated("r", 1, {1, 1, 1}), Sliced("emb", 2, {1, 0, 0}),
           Sliced("empty", 3, {}), Sliced("head", 2, {0, 0, 1}), Replicated("q", 5, {1, 2, 0})}};
}

std::vector<Scenario> LargeScenarios() {
  std::vector<Scenario> scenarios(5);
  scenarios[1].absent = {{1, {"r"}}, {0, {"r", "q"}}};
  scenarios[1].facts[0] = Finite({0.1, 0.7});
  scenarios[2].absent = {{0, {"a"}}, {1, {"a", "q"}}};
  scenarios[2].facts[1] = Overflowed(2);
  scenarios[2].facts[2] = Overflowed(3);
  scenarios[3].skip = true;
  scenarios[4].absent = {{2, {"head", "a"}}};
  scenarios[4].facts[2] = Finite({1e-20, 3, 1e20});
  return scenarios;
}

Result RunLarge(std::uint64_t seed) {
  RunSpec spec = DynamicSpec(LossScalePolicy::kTorch);
  spec.max_grad_norm = 0.5;
  spec.reduce_micro_batches = Reduction::kMean;
  MachineDriver d(Large(), spec);
  d.micro_batches = 2;
  d.answers = false;
  std::mt19937_64 random(seed);
  std::map<std::uint64_t, std::int64_t> waiters;
  for (const Scenario& scenario : LargeScenarios()) {
    std::vector<Event> events = EventsOf(d, scenario);
    // Seed 0 is the plain order; others shuffle and repeat calls.
    if (seed != 0) {
      const std::size_t repeats = random() % 6;
      for (std::size_t i = 0; i < repeats; ++i) events.push_back(events[random() % events.size()]);
      std::shuffle(events.begin(), events.end(), random);
      MakeLegal(events);
    }
    const auto between = [&](MachineDriver& driver) {
      while (!driver.open_reductions.empty() && random() % 2 == 0) {
        std::swap(driver.open_reductions.front(),
                  driver.open_reductions[random() % driver.open_reductions.size()]);
        driver.Reduce();
      }
      if (driver.commit_open && random() % 2 == 0) driver.Commit();
    };
    RunStep(d, scenario, events, between, waiters);
  }
  return ResultOf(d, waiters);
}

TEST(StepMachineOrder, ShuffledAndRepeatedCallsEndAlikeOverManySteps) {
  const Result expected = RunLarge(0);
  ASSERT_EQ(expected.outcomes.size(), 5u);
  EXPECT_TRUE(expected.outcomes[1].applied);
  EXPECT_EQ(expected.outcomes[2].cause, SkipCause::kOverflow);
  EXPECT_EQ(expected.outcomes[3].next_loss_scale, 65536 / 4);
  EXPECT_EQ(expected.commits.size(), 3u);
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    ASSERT_EQ(RunLarge(seed), expected) << "seed " << seed;
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(StepMachineOrder, ACopyOfTheMachineGoesOnAlike) {
  MachineDriver d(Large());
  d.Step();
  d.BeginAll();
  StepMachine copy = d.machine;
  d.Raise(7);
  EXPECT_EQ(copy.generation(), 1);
  EXPECT_TRUE(copy.step_in_flight());
  Effects effects;
  EXPECT_TRUE(copy.OnSlice({0, 0, 0, 0}, 1, 1, 9, effects).ok());
}

}  // namespace
}  // namespace muond
