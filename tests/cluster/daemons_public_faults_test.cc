// Faults that other distributed optimizers were reported for, over several daemons: each test
// carries the name of its issue. tests/regressions.md lists all of them, here and elsewhere.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/raw_trainer.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

// A matrix of which a rank holds the lower half only: it must not be orthogonalized by itself.
TEST(PublicFaults, DeepSpeed7438_AMatrixWaitsForAllItsShards) {
  Cluster cluster(2);
  TestRun run(cluster.channel(0), SpecOf({Matrix("w", 4, 3)}, 2), {.cut = {Cut::kFlat}});
  const std::string before = run.TensorDigest();
  const int owner =
      run.session().routing().parameters(0).owner() == run.Status().daemons(0) ? 0 : 1;
  RawTrainer upper(cluster.service(owner), "run", 0), lower(cluster.service(owner), "run", 1);
  Must(upper.Begin(0));
  Must(lower.Begin(0));
  Must(upper.Push(0, ChunksOf("w", 0, Bytes(Noise(6, 1)), 1 << 20)));
  const auto missing = upper.Finish(0, {}, 300);
  EXPECT_TRUE(absl::IsDeadlineExceeded(missing.status())) << missing.status();
  EXPECT_THAT(missing.status().ToString(), HasSubstr("parameter \"w\": slices [0] of rank 1"));
  EXPECT_EQ(run.TensorDigest(), before);
}

// Each shard divided by its own norm gives other rows: [[.47], [.51], [.56], [.45]].
TEST(PublicFaults, EmergingOptimizersTp_ShardsAreNormalizedByTheNormOfTheWhole) {
  const Tensors gradient = {{"w", {3, 0, 0, 4, 1, 0, 0, 1}}};
  Tensors weights[2];
  for (const bool sharded : {false, true}) {
    Cluster cluster(sharded ? 2 : 1);
    const RunSpec spec = SpecOf({Matrix("w", 4, 2)}, sharded ? 4 : 1);
    TestRun run(cluster.channel(0), spec, {.cut = {sharded ? Cut::kRows : Cut::kWhole}});
    ASSERT_TRUE(run.Step(gradient).applied);
    weights[sharded] = run.Weights();
  }
  EXPECT_EQ(weights[1], weights[0]);
}

// The owner's reduction fails: nobody else may have applied the step.
TEST(PublicFaults, Torchft183_AShardThatFailsBeforeTheCommitIsAppliedNowhere) {
  Cluster cluster(2, {.threads = 1,
                      .peer_patience = absl::Milliseconds(300),
                      .fault_points = "fail_reduce:1:1"});
  // Each daemon owns one matrix: the second reduction of either fails, that is, in the second step.
  TestRun run(cluster.channel(0), SpecOf({Matrix("a", 8, 8), Matrix("b", 8, 8)}),
              {.call_timeout = absl::Seconds(6), .step_timeout = absl::Seconds(6)});
  ASSERT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
  for (const auto& outcome : run.TryStep({.gradients = {{NoiseFor(run.spec(), 2)}}})) {
    EXPECT_FALSE(outcome.ok());
  }
  for (int daemon = 0; daemon < 2; ++daemon) {
    client::Admin admin(cluster.channel(daemon), absl::Seconds(5));
    const v1::RunStatus status = Must(admin.Status("run")).runs(0);
    EXPECT_EQ(status.steps_applied(), 1) << daemon;
    EXPECT_EQ(status.position().next_step(), 1) << daemon;
  }
}

}  // namespace
}  // namespace muond::cluster
