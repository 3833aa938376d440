// Raising the generation: what is in flight starts over on all daemons, what was applied stays.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cluster/steps_of.h"
#include "tests/support/cluster_fixture.h"

namespace muond::cluster {
namespace {

RunSpec Spec(std::int64_t world_size) {
  return SpecOf({Matrix("a", 16, 8), Matrix("b", 16, 8), Vector("v", 9)}, world_size);
}

class Generation : public ::testing::TestWithParam<int> {
 protected:
  Generation() : cluster_(GetParam()), run_(cluster_.channel(0), Spec(2), {.cut = {Cut::kFlat}}) {}
  Cluster cluster_;
  TestRun run_;
};
INSTANTIATE_TEST_SUITE_P(OfDaemons, Generation, ::testing::Values(1, 3));

TEST_P(Generation, ARaisedOneStartsTheStepOverForAllRanks) {
  ASSERT_TRUE(run_.Step(NoiseFor(run_.spec(), 1)).applied);
  const std::string before = run_.TensorDigest();
  ASSERT_TRUE(run_.session(0).Begin({.step = 1, .loss_scale = 1}).ok());
  ASSERT_TRUE(run_.session(1).Begin({.step = 1, .loss_scale = 1}).ok());
  ASSERT_TRUE(run_.session(1).RaiseGeneration("gradients were lost").ok());
  const std::int64_t raised = run_.session(1).generation();
  EXPECT_GT(raised, 1);
  const auto finished = run_.session(0).Finish();
  EXPECT_TRUE(absl::IsFailedPrecondition(finished.status())) << finished.status();
  ASSERT_TRUE(run_.session(0).Rejoin().ok());
  EXPECT_EQ(run_.session(0).generation(), raised);
  EXPECT_EQ(run_.TensorDigest(), before);
  EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 2)).applied);
}

TEST_P(Generation, WhoeverComesSecondFindsItRaised) {
  ASSERT_TRUE(run_.session(0).RaiseGeneration("first").ok());
  const absl::Status second = run_.session(1).RaiseGeneration("second");
  ASSERT_TRUE(second.ok()) << second;
  EXPECT_GT(run_.session(0).generation(), 1);
  EXPECT_EQ(run_.session(1).generation(), run_.session(0).generation());
  EXPECT_TRUE(run_.Step(NoiseFor(run_.spec(), 2)).applied);
}

// The other rank waits in Finish when its step is started over: its Step begins anew by itself.
TEST_P(Generation, ARankThatWaitsStepsAgainByItself) {
  const StepInput input{.gradients = {{NoiseFor(run_.spec(), 1)}}};
  absl::StatusOr<StepOutcome> waited = absl::UnknownError("not answered");
  std::thread waiting([&] { waited = run_.StepRank(0, input); });
  Eventually("one rank waits", [&] { return run_.Status().waiting_ranks_size() == 1; });
  ASSERT_TRUE(run_.session(1).RaiseGeneration("its gradients were lost").ok());
  const auto outcome = run_.StepRank(1, input);
  waiting.join();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ASSERT_TRUE(waited.ok()) << waited.status();
  EXPECT_EQ(*waited, *outcome);
  EXPECT_EQ(run_.Status().steps_applied(), 1);
}

TEST_P(Generation, ReinitializingForgetsTheStateAndKeepsTheStep) {
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(run_.Step(NoiseFor(run_.spec(), step)).applied);
  }
  const Tensors weights = run_.Weights();
  run_.Reinitialize(weights);
  EXPECT_EQ(run_.session(0).next_step(), 3);
  EXPECT_EQ(run_.Weights(), weights);
  for (const char* name : {"a", "b", "v"}) {
    EXPECT_EQ(run_.Describe(name).t(), 0) << name;
    EXPECT_EQ(run_.Describe(name).momentum_norm(), 0) << name;
  }
  const StepOutcome outcome = run_.Step(NoiseFor(run_.spec(), 9));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.step, 3);
}

// Ranks that all want it, each through another daemon: one state comes of it, with everybody's
// values, and nobody's are wiped by whoever comes second.
TEST(Generations, TwoThatReinitializeAtATimeEndInOneState) {
  for (int repetition = 0; repetition < 4; ++repetition) {
    Cluster cluster(3, {.threads = 1, .peer_patience = absl::Milliseconds(300)});
    const RunSpec spec = Spec(3);
    TestRun run(cluster.channel(0), spec, {.cut = {Cut::kFlat}});
    ASSERT_TRUE(run.Step(NoiseFor(spec, 1)).applied);
    const Tensors weights = run.Weights();
    cluster.Stop(1);
    cluster.Start(1);
    std::vector<std::unique_ptr<client::Session>> sessions;
    for (int rank = 0; rank < 3; ++rank) {
      sessions.push_back(Must(client::Session::Open(
          spec, rank, run.slices(rank),
          {.channel = cluster.channel(rank), .transport = "grpc"})));
    }
    std::vector<std::string> memory[3];
    std::vector<absl::Status> told(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<client::SliceSource> sources;
        for (const auto& [name, boxes] : run.slices(rank)) {
          for (std::size_t i = 0; i < boxes.size(); ++i) {
            memory[rank].push_back(
                BoxBytes(boxes[i], *run.parameter(name).shape, weights.at(name), Dtype::kF32));
            sources.push_back({.parameter = name,
                               .slice = static_cast<std::int64_t>(i),
                               .elements = boxes[i].Elements()});
          }
        }
        for (std::size_t i = 0; i < sources.size(); ++i) sources[i].data = memory[rank][i].data();
        told[rank] = sessions[rank]->Reinitialize(sources, "all at once").status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& each : told) EXPECT_TRUE(each.ok()) << each;
    // All values are there: the run goes on without anybody sending them again.
    for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(run.session(rank).Rejoin().ok());
    EXPECT_EQ(run.session(0).state(), v1::RUN_STATE_RUNNING);
    EXPECT_EQ(run.session(0).next_step(), 1);
    EXPECT_EQ(run.Weights(), weights);
    EXPECT_TRUE(run.Step(NoiseFor(spec, 2)).applied);
    EXPECT_EQ(StepsOf(cluster, "a"), 1);
  }
}

// Two coordinators with one number could give it to two orders.
TEST(Generations, EachDaemonRaisesToNumbersOfItsOwn) {
  Cluster cluster(3);
  for (int daemon = 0; daemon < 3; ++daemon) {
    RunSpec spec = Spec(1);
    spec.name = "of-" + std::to_string(daemon);
    TestRun run(cluster.channel(daemon), spec);
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(run.session().RaiseGeneration("test").ok());
      EXPECT_EQ(run.session().generation() % 3, daemon);
    }
  }
}

}  // namespace
}  // namespace muond::cluster
