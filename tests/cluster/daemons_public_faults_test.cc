// Faults that other distributed optimizers were reported for, over several daemons: each test
// carries the name of its issue. tests/regressions.md lists all of them, here and elsewhere.
#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
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
              {.call_timeout = absl::Seconds(3), .step_timeout = absl::Seconds(3)});
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

// There the optimizer took it that somebody else had orthogonalized already, and nobody had.
TEST(PublicFaults, DeepSpeed8441_WhatTheServiceAppliesItHasOrthogonalizedItself) {
  Cluster cluster(2);
  RunSpec spec = SpecOf({Matrix("a", 4, 4), Matrix("b", 4, 4)});
  TestRun run(cluster.channel(0), spec);
  const Tensors before = run.Weights();
  const Tensors gradients = NoiseFor(spec, 7);
  EXPECT_EQ(run.Step(gradients).newton_schulz_calls, 2) << "one for each matrix";
  double calls = 0;
  for (int daemon = 0; daemon < 2; ++daemon) {
    const auto samples = ParseExposition(cluster.service(daemon).Metrics());
    calls += samples.at("muond_newton_schulz_calls_total{group=\"muon\",run=\"run\"}");
  }
  EXPECT_EQ(calls, 2);
  // Gradient descent would leave the gradient's direction; this update has singular values near 1.
  for (const char* name : {"a", "b"}) {
    double update = 0, descent = 0;
    const Tensors after = run.Weights();
    for (int i = 0; i < 16; ++i) {
      const double was = (1 - 0.1 * 0.1) * before.at(name)[i];
      update += std::pow((after.at(name)[i] - was) / 0.1, 2);
      descent += std::pow((after.at(name)[i] - was) / 0.1 + gradients.at(name)[i], 2);
    }
    EXPECT_NEAR(std::sqrt(update), 1.8, 0.5) << "four singular values of about 1";
    EXPECT_GT(std::sqrt(descent), 0.1) << "not the gradient itself";
  }
}

TEST(PublicFaults, NorMuon3_AbsentIsUntouchedAndZeroDecays) {
  Cluster cluster(2);
  RunSpec spec = SpecOf({Matrix("a", 4, 4), Matrix("b", 4, 4)});
  TestRun run(cluster.channel(0), spec, {.initial = {{"a", Floats(16, 1)}, {"b", Floats(16, 1)}}});
  ASSERT_TRUE(run.Step({{"b", Floats(16, 0)}}).applied);
  EXPECT_EQ(run.Weights().at("a"), Floats(16, 1));
  EXPECT_EQ(run.Weights().at("b"), Floats(16, .99f));
  EXPECT_EQ(run.Describe("a").t(), 0);
}

}  // namespace
}  // namespace muond::cluster
