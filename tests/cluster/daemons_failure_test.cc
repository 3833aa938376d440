// What a daemon's death does to a run: the others apply nothing, everyone is told in time, and the
// run goes on from the trainers' parameters when they ask for it.
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "server/cluster/hello.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/raw_trainer.h"

namespace muond::cluster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RunSpec Spec(std::int64_t world_size = 1) {
  return SpecOf({Matrix("a", 16, 8), Matrix("b", 16, 8), Matrix("c", 16, 8)}, world_size);
}

ServiceOptions Impatient() {
  return {.threads = 1, .peer_patience = absl::Milliseconds(300)};
}

TestRunOptions Short() {
  return {.cut = {Cut::kFlat},
          .call_timeout = absl::Seconds(2),
          .step_timeout = absl::Seconds(3),
          .recovery_timeout = absl::ZeroDuration()};
}

TEST(DaemonDeath, ParameterServer32_CallersAreToldWithinTheDeadlineAndNothingIsApplied) {
  Cluster cluster(3, Impatient());
  TestRun run(cluster.channel(0), Spec(2), Short());
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  client::Admin survivor(cluster.channel(0), absl::Seconds(5));
  cluster.Stop(2);
  const absl::Time start = absl::Now();
  for (const auto& outcome : run.TryStep({.gradients = {{NoiseFor(run.spec(), 2)}}})) {
    EXPECT_TRUE(absl::IsUnavailable(outcome.status())) << outcome.status();
    EXPECT_THAT(outcome.status().ToString(), HasSubstr(cluster.endpoint(2).substr(7)));
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
  EXPECT_EQ(Must(survivor.Status("run")).runs(0).steps_applied(), 1);
}

// Everything was sent to daemon 0, nothing to daemon 1, which lives but has nothing to vote on.
TEST(DaemonDeath, AMissingVoteIsNamedAtTheDeadline) {
  Cluster cluster(2, Impatient());
  TestRun run(cluster.channel(0), SpecOf({Matrix("a", 16, 8)}), Short());
  const int owner = run.session().routing().parameters(0).owner() ==
                            run.Status().daemons(0)
                        ? 0
                        : 1;
  RawTrainer trainer(cluster.service(owner), "run");
  Must(trainer.Begin(0));
  Must(trainer.Push(0, ChunksOf("a", 0, Bytes(Noise(16 * 8, 1)), 1 << 20)));
  const auto outcome = trainer.Finish(0, {}, 500);
  EXPECT_TRUE(absl::IsDeadlineExceeded(outcome.status())) << outcome.status();
  EXPECT_THAT(outcome.status().ToString(), HasSubstr("votes of daemons ["));
  // The other one hears the same, and all is well: what had come in was kept.
  RawTrainer late(cluster.service(1 - owner), "run");
  Must(late.Begin(0));
  EXPECT_TRUE(Must(late.Finish(0)).applied());
  EXPECT_TRUE(Must(trainer.Finish(0)).applied());
}

TEST(DaemonDeath, OneThatComesBackEmptyNeedsARestore) {
  Cluster cluster(3, Impatient());
  TestRun run(cluster.channel(0), Spec(2), Short());
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(run.Step(NoiseFor(run.spec(), step)).applied);
  }
  const Tensors weights = run.Weights();
  cluster.Stop(1);
  cluster.Start(1);
  for (std::int64_t rank : {0, 1}) {
    ASSERT_TRUE(run.session(rank).Rejoin().ok());
    EXPECT_EQ(run.session(rank).state(), v1::RUN_STATE_NEEDS_RESTORE);
    EXPECT_EQ(run.session(rank).next_step(), 3);
    const absl::Status begun = run.session(rank).Begin({.step = 3, .loss_scale = 1});
    EXPECT_TRUE(absl::IsFailedPrecondition(begun)) << begun;
    EXPECT_THAT(begun.ToString(), HasSubstr("needs a restore before step 3"));
  }
  client::Admin admin(cluster.channel(1), absl::Seconds(5));
  EXPECT_EQ(Must(admin.Status("run")).runs(0).position().state(), v1::RUN_STATE_NEEDS_RESTORE);

  run.Reinitialize(weights);
  EXPECT_EQ(run.session(0).next_step(), 3);
  EXPECT_GT(run.session(0).generation(), 1);
  EXPECT_EQ(run.Weights(), weights);
  const StepOutcome outcome = run.Step(NoiseFor(run.spec(), 3));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.step, 3);
}

// The other one waits for its vote until the deadline: nobody need wait with it.
TEST(Daemons, OneThatRefusesForGoodIsHeardAtOnce) {
  Cluster cluster(2);
  TestRun run(cluster.channel(0), Spec(), {.step_timeout = absl::Seconds(40)});
  const Tensors gradients = NoiseFor(run.spec(), 1);
  std::vector<client::SliceSource> sources;
  for (const auto& [name, values] : gradients) {
    sources.push_back({.parameter = name, .data = values.data(), .elements = std::ssize(values)});
  }
  Must(run.session().Begin({.step = 0, .loss_scale = 1}));
  Must(run.session().Push(sources));
  const absl::Time start = absl::Now();
  // Whoever owns "a" has slices of it.
  const auto refused = run.session().Finish({"a"});
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  EXPECT_THAT(refused.status().ToString(), HasSubstr("which has pushed slices of it"));
}

// A generation is raised on all daemons or on none.
TEST(DaemonDeath, TheGenerationIsNotRaisedWithoutTheDeadOne) {
  Cluster cluster(2, Impatient());
  TestRun run(cluster.channel(0), Spec(), Short());
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  cluster.Stop(1);
  client::Admin survivor(cluster.channel(0), absl::Seconds(5));
  const absl::Status raised = run.session().RaiseGeneration("try");
  EXPECT_TRUE(absl::IsUnavailable(raised)) << raised;
  EXPECT_THAT(raised.ToString(), HasSubstr("daemon \"unix:"));
  EXPECT_EQ(Must(survivor.Status("run")).runs(0).position().generation(), 1);
}

// Its plan is the same: only the list tells that its votes would go astray.
TEST(Daemons, OneWithAnotherListOfPeersIsRefused) {
  Cluster cluster(2, Impatient());
  auto stranger = StartService({.threads = 1,
                                .listen = {cluster.endpoint(0) + ".other"},
                                .peers = cluster.endpoint(0) + ".other," + cluster.endpoint(1)});
  const auto opened = client::Session::Open(Spec(), 0, CutOf(Spec(), {}, 0),
                                            {.channel = stranger->channel()});
  EXPECT_TRUE(absl::IsFailedPrecondition(opened.status())) << opened.status();
  EXPECT_THAT(opened.status().ToString(), HasSubstr("different lists of peers"));
}

// A foreign client may not compare: the daemons do.
TEST(Daemons, APeerWithAnotherListOfPeersIsRefused) {
  Cluster cluster(2, Impatient());
  TestRun run(cluster.channel(0), Spec());
  Peers stranger({.daemons = {cluster.endpoint(0) + ".other", cluster.endpoint(1)}, .self = 0},
                 absl::Seconds(1));
  const auto answers = AskHello(stranger, "run", run.session().registered().plan_hash(),
                                absl::Seconds(5));
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers[0].status)) << answers[0].status;
  EXPECT_THAT(answers[0].status.ToString(), HasSubstr("has another list of daemons"));
}

// Refused by the daemon that comes second, with both numbers; the run is the first one's still.
TEST(Daemons, OneWithAnotherNumberOfDevicesIsRefused) {
  Cluster cluster(2, Impatient(), [](int daemon, ServiceOptions& options) {
    options.make_backends = [daemon](const kernels::BackendOptions& made) {
      std::vector<std::unique_ptr<kernels::Backend>> backends;
      for (int i = 0; i <= daemon; ++i) backends.push_back(kernels::MakeCpuBackend(made));
      return backends;
    };
  });
  const auto opened = client::Session::Open(Spec(), 0, CutOf(Spec(), {}, 0),
                                            {.channel = cluster.channel(0)});
  EXPECT_TRUE(absl::IsFailedPrecondition(opened.status())) << opened.status();
  EXPECT_THAT(opened.status().ToString(),
              AllOf(HasSubstr("has 2 devices, this one 1: "),
                    HasSubstr("(--devices)")));
}

}  // namespace
}  // namespace muond::cluster
