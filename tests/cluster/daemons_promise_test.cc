// What a raise of the generation leaves behind that was broken off half way: promises that nobody
// takes up, daemons with new and with old state, and what a daemon still knows when it comes back.
#include <atomic>
#include <cmath>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/steady_time.h"
#include "server/cluster/raise_generation.h"
#include "tests/cluster/half_coordinator.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/raw_trainer.h"

namespace muond::cluster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RunSpec Spec(std::int64_t world_size = 1) {
  return SpecOf({Matrix("a", 16, 8), Matrix("b", 16, 8), Matrix("c", 16, 8)}, world_size);
}

ServiceOptions Options(absl::Duration patience = absl::Milliseconds(300)) {
  return {.threads = 1, .peer_patience = patience};
}

// Whoever asked for the promises has died: the trainers need do nothing about it.
TEST(Promise, ThatNobodyTakesUpIsRaisedByTheDaemonsThemselves) {
  Cluster cluster(3, Options());
  TestRun run(cluster.channel(0), Spec(2), {.cut = {Cut::kFlat}});
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  HalfCoordinator dead(run, 0);
  Must(dead.Prepare(1, 60));
  Must(dead.Prepare(2, 60));
  const StepOutcome outcome = run.Step(NoiseFor(run.spec(), 2));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.step, 1);
  EXPECT_GT(run.session(0).generation(), 60);
  EXPECT_EQ(run.Status().steps_applied(), 2);
}

// Some have raised it already, one only promised: a trainer finds them at different generations.
TEST(Promise, HalfRaisedIsCompletedWhileTheTrainersStep) {
  Cluster cluster(2, Options());
  TestRun run(cluster.channel(0), Spec(), {});
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  HalfCoordinator dead(run, 0);
  Must(dead.Prepare(1, 60));
  const absl::Status raised = run.session().RaiseGeneration("test");
  ASSERT_TRUE(raised.ok()) << raised;
  EXPECT_GT(run.session().generation(), 60) << "above the promise, at once";
  EXPECT_TRUE(run.Step(NoiseFor(run.spec(), 2)).applied);
}

// A re-initialization that reached one daemon only; then somebody raises the generation as usual.
// Joined, the three would go on with new and with old state.
TEST(Lineage, APlainRaiseDoesNotJoinNewAndOldState) {
  Cluster cluster(3, Options(absl::Seconds(30)));
  TestRun run(cluster.channel(0), Spec(), {.call_timeout = absl::Seconds(5)});
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  const Tensors weights = run.Weights();
  HalfCoordinator dead(run, 0), other(run, 1);
  Must(dead.Prepare(1, 60, true));
  Must(dead.Prepare(2, 60, true));
  Must(other.Prepare(0, 60, true));
  Must(dead.Reinitialize(1, 60, 1));

  const absl::Status raised = run.session().RaiseGeneration("as usual");
  EXPECT_TRUE(absl::IsFailedPrecondition(raised)) << raised;
  EXPECT_THAT(raised.ToString(),
              AllOf(HasSubstr("1.sock] have that of generation 60"),
                    HasSubstr("2.sock] have that of generation 1"),
                    HasSubstr("reinitialize"), HasSubstr("restore a checkpoint")));
  const auto outcomes = run.TryStep({.gradients = {{NoiseFor(run.spec(), 2)}}});
  EXPECT_TRUE(absl::IsFailedPrecondition(outcomes[0].status())) << outcomes[0].status();
  EXPECT_THAT(outcomes[0].status().ToString(), HasSubstr("don't belong together"));

  run.Reinitialize(weights);
  EXPECT_EQ(run.Weights(), weights);
  const StepOutcome outcome = run.Step(NoiseFor(run.spec(), 2));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.step, 1);
}

// A recovery reaches the daemons one by one. Who has been told already votes, and hears from one
// that has not that it needs a restore: that is over, and no reason for another.
TEST(Raise, WhatAPeerSaysFromBelowTheGenerationIsOld) {
  Cluster cluster(2, Options(absl::Seconds(30)));
  TestRun run(cluster.channel(0), Spec(), {});
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  cluster.Stop(1);
  cluster.Start(1);
  RawTrainer back(cluster.service(1), "run");
  Must(back.Register(back.RegisterRequestOf(run.spec(), run.slices(0))));
  ASSERT_FALSE(back.Begin(1).ok());
  ASSERT_EQ(back.position()->state(), v1::RUN_STATE_NEEDS_RESTORE);

  HalfCoordinator coordinator(run, 1);
  Must(coordinator.Prepare(0, 60));
  Must(coordinator.Recover(0, 60));
  RawTrainer trainer(cluster.service(0), "run", 0, 60);
  Must(trainer.Begin(1));
  const Tensors gradients = NoiseFor(run.spec(), 2);
  for (const auto& [name, values] : gradients) {
    trainer.Push(1, {ChunkOf(name, 0, 0, Bytes(values))}).IgnoreError();  // not its own: refused
  }
  // It votes, and asks for the other's vote many times.
  const auto outcome = trainer.Finish(1, {}, /*wait_ms=*/500);
  EXPECT_TRUE(absl::IsDeadlineExceeded(outcome.status())) << outcome.status();
  ASSERT_TRUE(trainer.position());
  EXPECT_EQ(trainer.position()->state(), v1::RUN_STATE_RUNNING) << outcome.status();
}

// One that waited for its turn until its time was over is not done, nobody may take it for that.
TEST(Raise, WithoutTimeToTryIsNoSuccess) {
  Peers peers({.daemons = {"127.0.0.1:1", "127.0.0.1:2"}, .self = 0}, absl::Seconds(1));
  RaiseHooks never;
  never.prepare = [](std::int64_t) -> absl::StatusOr<DaemonPromise> {
    return absl::InternalError("asked");
  };
  never.raise = [](const RaiseOrder&) { return absl::InternalError("raised"); };
  const absl::Status raised = RaiseGeneration(peers, "run", "a plan", {.current = 1}, never,
                                              SteadyNow() - absl::Seconds(1));
  EXPECT_TRUE(absl::IsUnavailable(raised)) << raised;
}

// Acknowledged means: nothing of the old generation is under way any more, on any daemon.
TEST(Raise, IsAcknowledgedOnlyAfterACommitThatIsInFlight) {
  ServiceOptions options = Options();
  options.fault_points = "delay_commit:0:1";
  Cluster cluster(2, options);
  TestRun run(cluster.channel(0), Spec(2), {.cut = {Cut::kFlat}});
  StepInput input{.gradients = {{NoiseFor(run.spec(), 1)}}};
  std::thread stepping([&] { run.TryStep(input); });
  // How often it fired stays: looking too late finds it, too.
  Eventually("both commit", [&] {
    return cluster.service(0).FaultsFired("delay_commit") > 0 &&
           cluster.service(1).FaultsFired("delay_commit") > 0;
  });
  const auto other = Must(client::Session::Open(run.spec(), 0, run.slices(0),
                                                {.channel = cluster.channel(0)}));
  ASSERT_TRUE(other->RaiseGeneration("test").ok());
  for (int daemon = 0; daemon < 2; ++daemon) {
    client::Admin each(cluster.channel(daemon), absl::Seconds(5));
    EXPECT_EQ(Must(each.Status("run")).runs(0).steps_applied(), 1) << daemon;
  }
  EXPECT_EQ(other->next_step(), 1);
  stepping.join();
}

class Restart : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfDaemons, Restart, ::testing::Values(1, 3));

// Late messages of the former life must find their generation over.
TEST_P(Restart, DoesNotGoBackToAnOlderGeneration) {
  ServiceOptions options = Options();
  options.state_dir = "yes";
  Cluster cluster(GetParam(), options);
  std::int64_t reached = 0;
  {
    TestRun run(cluster.channel(0), Spec(), {});
    ASSERT_TRUE(run.session().RaiseGeneration("test").ok());
    ASSERT_TRUE(run.session().RaiseGeneration("test").ok());
    reached = run.session().generation();
    EXPECT_GT(reached, 2);
  }
  for (int daemon = 0; daemon < cluster.count(); ++daemon) cluster.Stop(daemon);
  for (int daemon = 0; daemon < cluster.count(); ++daemon) cluster.Start(daemon);
  TestRun run(cluster.channel(0), Spec(), {});
  EXPECT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  EXPECT_GT(run.session().generation(), reached);
  // A run that was closed is over: the next one of its name owes it nothing.
  ASSERT_TRUE(Must(run.session().Close()));
  TestRun next(cluster.channel(0), Spec(), {});
  EXPECT_EQ(next.session().generation(), 1);
}

// Of one moment: steps end all the time, and each doubles the scale.
TEST(Rejoin, TellsTheLossScaleOfItsOwnStep) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kDynamic;
  spec.loss_scale.initial = 1;
  spec.loss_scale.window = 1;
  Cluster cluster(2, Options());
  TestRun run(cluster.channel(0), spec, {});
  std::atomic<bool> over = false;
  std::thread joining([&] {
    client::Session& session = run.session();
    const auto again = Must(client::Session::Open(run.spec(), 0, run.slices(0),
                                                  {.channel = cluster.channel(0),
                                                   .transport = "grpc"}));  // arenas are one's own
    while (!over) {
      ASSERT_TRUE(again->Rejoin().ok());
      EXPECT_EQ(again->loss_scale(), std::ldexp(1.0, static_cast<int>(again->next_step())));
    }
    (void)session;
  });
  for (int step = 0; step < 60; ++step) {
    ASSERT_TRUE(run.Step(NoiseFor(run.spec(), step)).applied);
  }
  over = true;
  joining.join();
}

}  // namespace
}  // namespace muond::cluster
