// A run that spans several daemons: who owns what, one verdict for all, errors that name.
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/support/cluster_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Two matrices and two vectors: with three daemons each has something, none has all.
RunSpec Spec(std::int64_t world_size = 1) {
  return SpecOf({Matrix("a", 64, 32), Matrix("b", 64, 32), Vector("v", 300000), Vector("u", 5)},
                world_size);
}

Tensors Gradients(const TestRun& run, int step) { return NoiseFor(run.spec(), 50 + step); }

TEST(Daemons, TheRoutingReportNamesTheOwnerOfEachParameter) {
  Cluster cluster(3);
  TestRun run(cluster.channel(1), Spec());
  EXPECT_EQ(run.session().daemons(), 3);
  std::set<std::string> owners;
  for (const auto& routed : run.session().routing().parameters()) {
    EXPECT_THAT(routed.owner(), HasSubstr(".sock")) << routed.name();
    if (routed.name() == "a" || routed.name() == "b") owners.insert(routed.owner());
  }
  EXPECT_EQ(owners.size(), 2u) << "equal matrices go to different daemons";
}

TEST(Daemons, EachHoldsItsShareOfTheState) {
  Cluster cluster(3);
  TestRun run(cluster.channel(0), Spec());
  std::int64_t total = 0;
  for (int daemon = 0; daemon < 3; ++daemon) {
    client::Admin admin(cluster.channel(daemon), absl::Seconds(10));
    const v1::RunStatus status = Must(admin.Status("run")).runs(0);
    EXPECT_GT(status.state_bytes(), 0) << daemon;
    EXPECT_EQ(status.daemon(), daemon);
    EXPECT_EQ(status.daemons_size(), 3);
    total += status.state_bytes();
  }
  EXPECT_EQ(total, 2 * 64 * 32 * 8 + (300000 + 5) * 12);
}

// The gauges counted the whole run on every daemon, and second moments below zero.
TEST(Daemons, MemoryMetricsCountWhatEachHolds) {
  Cluster cluster(3);
  TestRun run(cluster.channel(0), Spec());
  std::map<std::string, double> bytes;
  for (int daemon = 0; daemon < 3; ++daemon) {
    const auto samples = ParseExposition(cluster.service(daemon).Metrics());
    for (const char* kind : {"master", "momentum", "second_moment"}) {
      const double held = samples.at(
          absl::StrFormat("muond_memory_bytes{kind=\"%s\",location=\"host\"}", kind));
      EXPECT_GE(held, 0) << kind << " of daemon " << daemon;
      bytes[kind] += held;
    }
  }
  constexpr double kAdamW = 300000 + 5, kMuon = 2 * 64 * 32;
  EXPECT_EQ(bytes["master"], 4 * (kAdamW + kMuon));
  EXPECT_EQ(bytes["momentum"], 4 * (kAdamW + kMuon));
  EXPECT_EQ(bytes["second_moment"], 4 * kAdamW);
}

// Routing is the run's and told by all; what each holds sums up to the run.
TEST(Daemons, ParameterMetricsTellTheRunAndTheShard) {
  Cluster cluster(3);
  TestRun run(cluster.channel(0), Spec());
  constexpr double kElements = 2 * 64 * 32 + 300000 + 5;
  double owned = 0;
  for (int daemon = 0; daemon < 3; ++daemon) {
    double matrices = 0, elements = 0;
    for (const auto& [name, value] : ParseExposition(cluster.service(daemon).Metrics())) {
      if (name.rfind("muond_shard_elements{", 0) == 0) owned += value;
      if (name.rfind("muond_parameter_elements{", 0) == 0) elements += value;
      const bool muon = name.find("algorithm=\"muon\"") != std::string::npos;
      if (name.rfind("muond_parameters{", 0) == 0 && muon) matrices += value;
    }
    EXPECT_EQ(matrices, 2);
    EXPECT_EQ(elements, kElements);
  }
  EXPECT_EQ(owned, kElements);
}

// A local verdict would apply the step on the daemons whose own gradients are finite.
TEST(Daemons, DeepSpeed8435_AnOverflowOnOneSkipsTheStepOnAll) {
  Cluster cluster(3);
  TestRun run(cluster.channel(0), Spec());
  ASSERT_TRUE(run.Step(Gradients(run, 0)).applied);
  for (const char* name : {"a", "b", "v", "u"}) {
    SCOPED_TRACE(name);
    const std::string before = run.TensorDigest();
    Tensors spoiled = Gradients(run, 1);
    spoiled.at(name).back() = kInf;
    const StepOutcome outcome = run.Step(spoiled);
    EXPECT_FALSE(outcome.applied);
    EXPECT_EQ(outcome.cause, SkipCause::kOverflow);
    EXPECT_EQ(outcome.nonfinite_elements, 1);
    EXPECT_THAT(outcome.offenders, ::testing::ElementsAre(name));
    EXPECT_EQ(run.TensorDigest(), before);
    EXPECT_TRUE(run.Step(Gradients(run, 2)).applied);
  }
}

TEST(Daemons, NormClipAndScaleAreThoseOfOneDaemon) {
  RunSpec spec = Spec(2);
  spec.max_grad_norm = 0.5;
  spec.clip_policy = ClipPolicy::kAll;
  spec.loss_scale.mode = LossScaleMode::kDynamic;
  std::vector<StepOutcome> alone;
  for (const int daemons : {1, 3}) {
    Cluster cluster(daemons);
    TestRun run(cluster.channel(0), spec, {.cut = {Cut::kFlat}});
    for (int step = 0; step < 3; ++step) {
      StepOutcome outcome = run.Step(Gradients(run, step));
      EXPECT_LT(outcome.clip_coefficient, 1);
      if (daemons == 1) {
        alone.push_back(outcome);
      } else {
        EXPECT_EQ(outcome, alone[step]);
      }
    }
  }
}

TEST(Daemons, AParameterThatIsAbsentIsUntouchedOnWhicheverOwnsIt) {
  Cluster cluster(3);
  TestRun run(cluster.channel(2), Spec(2), {.cut = {Cut::kRows}});
  ASSERT_TRUE(run.Step(Gradients(run, 0)).applied);
  for (const char* name : {"a", "b", "v", "u"}) {
    SCOPED_TRACE(name);
    const auto before = run.Digest(true);
    Tensors gradients = Gradients(run, 1);
    gradients.erase(name);
    EXPECT_TRUE(run.Step(gradients).applied);
    const auto after = run.Digest(true);
    for (const auto& [parameter, digest] : after.parameters()) {
      EXPECT_EQ(digest == before.parameters().at(parameter), parameter == name) << parameter;
    }
  }
}

// Rank 0 holds the first half of "v" alone, rank 1 the second: a daemon that owns only elements of
// one half must judge by all ranks that hold the parameter.
TEST(Daemons, AbsentOnSomeRanksIsRefusedByAllDaemons) {
  Cluster cluster(3);
  TestRun run(cluster.channel(0), Spec(2), {.cut = {Cut::kRows}});
  const std::string before = run.TensorDigest();
  StepInput input{.gradients = {{Gradients(run, 0)}, {Gradients(run, 0)}}};
  input.gradients[1][0].erase("v");
  const auto outcomes = run.TryStep(input);
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(absl::IsFailedPrecondition(outcome.status())) << outcome.status();
    EXPECT_THAT(outcome.status().ToString(), HasSubstr("absent on ranks [1] but not on ranks [0]"));
  }
  EXPECT_EQ(run.TensorDigest(), before);
}

TEST(Daemons, RanksThatDisagreeAreNamed) {
  Cluster cluster(2);
  TestRun run(cluster.channel(0), Spec(2), {.cut = {Cut::kFlat}});
  StepBegin begin{.step = 0, .loss_scale = 1};
  ASSERT_TRUE(run.session(0).Begin(begin).ok());
  begin.micro_batches = 2;
  const absl::Status status = run.session(1).Begin(begin);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("ranks [0] sent 1, rank 1 sent 2"));
}

TEST(Daemons, TheTrainersOwnSkipIsOneVerdictToo) {
  Cluster cluster(3);
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  TestRun run(cluster.channel(0), spec);
  const std::string before = run.TensorDigest();
  const StepOutcome outcome = Must(run.session().Skip(SkipCause::kOverflow, 1024));
  EXPECT_FALSE(outcome.applied);
  EXPECT_EQ(outcome.cause, SkipCause::kOverflow);
  EXPECT_EQ(run.TensorDigest(), before);
}

TEST(Daemons, TwoRunsDoNotDisturbEachOther) {
  Cluster cluster(2);
  RunSpec other = Spec();
  other.name = "other";
  TestRun one(cluster.channel(0), Spec());
  TestRun two(cluster.channel(1), other);
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(one.Step(Gradients(one, step)).applied);
    EXPECT_TRUE(two.Step(Gradients(two, step)).applied);
    EXPECT_EQ(one.TensorDigest(), two.TensorDigest());
  }
  EXPECT_TRUE(Must(one.session().Close()));
  EXPECT_TRUE(two.Step(Gradients(two, 3)).applied);
}

// Any daemon digests the whole run, and so do the ones before it.
TEST(Daemons, EveryDaemonTellsTheDigestOfTheWholeRun) {
  Cluster cluster(3);
  TestRun run(cluster.channel(0), Spec());
  ASSERT_TRUE(run.Step(Gradients(run, 0)).applied);
  std::set<std::string> digests;
  for (int daemon = 0; daemon < 3; ++daemon) {
    client::Admin admin(cluster.channel(daemon), absl::Seconds(10));
    digests.insert(Must(admin.Digest("run")).tensor_digest());
  }
  EXPECT_EQ(digests.size(), 1u);
}

}  // namespace
}  // namespace muond::cluster
