// Several ranks: reduction of replicas, one verdict for all, absent gradients, missing ranks.
#include <cmath>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

constexpr float kInf = std::numeric_limits<float>::infinity();
const Floats kIdentity = {1, 0, 0, 1};

Floats Diagonal(float a, float b) { return {a, 0, 0, b}; }

std::string Message(const absl::Status& status) { return std::string(status.message()); }

RunSpec Replicated(std::vector<ParameterSpec> parameters, std::int64_t world_size) {
  for (ParameterSpec& parameter : parameters) parameter.replicated = true;
  return SpecOf(std::move(parameters), world_size);
}

// The mean of the ranks' Newton-Schulz results would be .348218 I, one corner alone .696437.
TEST(Replicas, DeepSpeed7807_TheMeanIsOrthogonalizedNotTheParts) {
  const auto service = StartService();
  RunSpec spec = Replicated({Matrix("w", 2, 2)}, 2);
  GroupOf(spec, "muon").muon = {.lr = 1, .weight_decay = 0};
  TestRun run(*service, spec, {.initial = {{"w", Diagonal(0, 0)}}});
  const StepOutcome outcome =
      run.Step(StepInput{.gradients = {{{{"w", Diagonal(2, 0)}}}, {{{"w", Diagonal(0, 2)}}}}});
  EXPECT_EQ(outcome.newton_schulz_calls, 1);
  EXPECT_NEAR(outcome.grad_norm, std::sqrt(2.0), 1e-7);
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(1e-6f), Diagonal(-1.1081112f, -1.1081112f)));
}

TEST(Replicas, SumAndMeanAreAsDeclared) {
  const auto service = StartService();
  for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
    RunSpec spec = Replicated({Vector("p", 1)}, 4);
    spec.name = reduction == Reduction::kMean ? "mean" : "sum";
    spec.reduce_ranks = reduction;
    TestRun run(*service, spec);
    const StepOutcome outcome = run.Step({{"p", {3}}});
    EXPECT_EQ(outcome.grad_norm, reduction == Reduction::kMean ? 3 : 12);
  }
}

TEST(Replicas, TransformerEngine715_ReplicasAreCountedOnceInTheNorm) {
  const auto service = StartService();
  TestRun run(*service, Replicated({Vector("p", 9)}, 4));
  EXPECT_EQ(run.Step({{"p", Floats(9, 1)}}).grad_norm, 3);
  EXPECT_EQ(run.Status().grad_norm(), 3);
}

TEST(Replicas, InitialValuesMustAgree) {
  const auto service = StartService();
  const RunSpec spec = Replicated({Vector("p", 2)}, 2);
  RawTrainer zero(*service, "run", 0), one(*service, "run", 1);
  Must(zero.Register(zero.RegisterRequestOf(spec, CutOf(spec, {}, 0))));
  Must(one.Register(one.RegisterRequestOf(spec, CutOf(spec, {}, 1))));
  EXPECT_FALSE(Must(zero.Initialize({ChunkOf("p", 0, 0, Bytes({1, 2}))})).complete());
  const absl::Status status = one.Initialize({ChunkOf("p", 0, 0, Bytes({1, 3}))}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("parameter \"p\""));
  EXPECT_THAT(Message(status), HasSubstr("replicas disagree"));
  EXPECT_TRUE(Must(one.Initialize({ChunkOf("p", 0, 0, Bytes({1, 2}))})).complete());
}

// ---- One verdict for all -----------------------------------------------------------------------

TEST(Replicas, Fairscale179_OneRanksOverflowIsEveryRanksSkip) {
  const auto service = StartService();
  for (const bool replicated : {true, false}) {
    std::vector<ParameterSpec> parameters = {Matrix("w", 4, 2), Vector("p", 4)};
    RunSpec spec = replicated ? Replicated(parameters, 2) : SpecOf(parameters, 2);
    spec.name = replicated ? "replicated" : "sliced";
    spec.loss_scale = {.mode = LossScaleMode::kDynamic, .policy = LossScalePolicy::kDeepSpeed};
    TestRun run(*service, spec, {.cut = {Cut::kRows}});
    const std::string before = run.TensorDigest();
    const Tensors good = NoiseFor(spec, 4);
    Tensors bad = good;
    bad.at("w")[7] = kInf;  // in the rows of rank 1
    const StepOutcome first = run.Step(StepInput{.gradients = {{good}, {bad}}});
    EXPECT_EQ(first.cause, SkipCause::kOverflow);
    EXPECT_EQ(first.next_loss_scale, 65536) << "hysteresis";
    EXPECT_EQ(run.Step(StepInput{.gradients = {{good}, {bad}}}).next_loss_scale, 32768);
    EXPECT_EQ(run.session(0).loss_scale(), 32768);
    EXPECT_EQ(run.session(1).loss_scale(), 32768) << "PyTorch #115710: all ranks back off";
    EXPECT_EQ(run.TensorDigest(), before);
    EXPECT_TRUE(run.Step(good).applied);
  }
}

TEST(Replicas, AWrongStepNumberIsToldToThatRankAlone) {
  const auto service = StartService();
  TestRun run(*service, Replicated({Vector("p", 1)}, 2), {.step_timeout = absl::Seconds(20)});
  RawTrainer ahead(*service, "run", 1);
  const absl::Status status = ahead.Begin(5);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(status), HasSubstr("expected step 0"));
  EXPECT_EQ(ahead.position()->next_step(), 0);
  EXPECT_TRUE(run.Step({{"p", {1}}}).applied);
}

TEST(Replicas, RanksThatBeginDifferentlyAreNamed) {
  const auto service = StartService();
  RunSpec spec = Replicated({Vector("p", 1)}, 2);
  spec.loss_scale.mode = LossScaleMode::kExternal;
  TestRun run(*service, spec);
  RawTrainer zero(*service, "run", 0), one(*service, "run", 1);
  const std::string before = run.TensorDigest();
  Must(zero.Begin(0, 4));
  const absl::Status status = one.Begin(0, 8);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status),
              HasSubstr("ranks disagree on loss_scale: ranks [0] sent 4, rank 1 sent 8"));
  const absl::Status other = zero.Finish(0).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument) << "told to both";
  EXPECT_THAT(Message(other), HasSubstr("rank 1 sent 8"));
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_TRUE(run.Step({{"p", {1}}}).applied);
}

// ---- Absent on one rank only -------------------------------------------------------------------

TEST(Replicas, KellerJordan37_AGradientThatOneRankLacksIsNoHang) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("w", 2, 2), Vector("p", 4)}, 2);
  TestRun run(*service, spec, {.cut = {Cut::kFlat}});
  const std::string before = run.TensorDigest();
  const Tensors all = NoiseFor(spec, 3);
  Tensors without = all;
  without.erase("w");
  for (const auto& outcome : run.TryStep(StepInput{.gradients = {{all}, {without}}})) {
    EXPECT_EQ(outcome.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Message(outcome.status()), HasSubstr("parameter \"w\""));
    EXPECT_THAT(Message(outcome.status()), HasSubstr("absent on ranks [1] but not on ranks [0]"));
  }
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_TRUE(run.Step(all).applied) << "rank 0's slices are duplicates, rank 1 pushes now";
}

TEST(Replicas, AReplicaThatOneRankLacksCountsAsZeroThere) {
  const auto service = StartService();
  TestRun run(*service, Replicated({Matrix("w", 2, 2), Vector("p", 1)}, 2),
              {.initial = {{"w", kIdentity}, {"p", {1}}}});
  const StepOutcome outcome =
      run.Step(StepInput{.gradients = {{{{"w", Diagonal(6, 8)}, {"p", {1}}}}, {{{"p", {1}}}}}});
  EXPECT_TRUE(outcome.applied);
  EXPECT_NEAR(outcome.grad_norm, std::sqrt(26.0), 1e-6) << "diag(3, 4): the mean is over the world";
  EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(1e-6f), Diagonal(.9177124f, .8780796f)));
  const Floats before = run.Weights().at("w");
  EXPECT_TRUE(run.Step({{"p", {1}}}).applied);
  EXPECT_EQ(run.Weights().at("w"), before) << "absent everywhere";
}

TEST(Replicas, AStepInWhichAllIsAbsentTouchesNothing) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Matrix("w", 2, 2), Vector("p", 2)}));
  const std::string before = run.TensorDigest();
  const StepOutcome outcome = run.Step(Tensors{});
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.grad_norm, 0);
  EXPECT_EQ(run.TensorDigest(), before);
}

// ---- Ranks that do not come --------------------------------------------------------------------

TEST(Replicas, TensorFlow5022_AMissingRankIsNamedAndMayComeLate) {
  const auto service = StartService();
  const RunSpec spec = Replicated({Matrix("w", 2, 2)}, 4);
  TestRun run(*service, spec, {.initial = {{"w", kIdentity}}});
  const v1::DigestReply before = run.Digest();
  const std::string gradient = Bytes({3, 0, 0, 4});
  std::vector<absl::Status> told(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    RawTrainer trainer(*service, "run", rank);
    Must(trainer.Begin(0));
    Must(trainer.Push(0, {ChunkOf("w", 0, 0, gradient)}));
    EXPECT_EQ(trainer.Finish(0, {}, /*wait_ms=*/1).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  // All of them wait again, side by side: whoever comes first, the same one is missing.
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      told[rank] = RawTrainer(*service, "run", rank).Finish(0, {}, /*wait_ms=*/300).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : told) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(Message(status), HasSubstr("missing: ranks [3]; parameter \"w\""));
  }
  EXPECT_EQ(run.TensorDigest(), before.tensor_digest());
  EXPECT_EQ(run.Digest().control_digest(), before.control_digest());
  EXPECT_TRUE(run.Status().step_in_flight());
  EXPECT_THAT(run.Status().waiting_ranks(), ::testing::ElementsAre(3));

  RawTrainer late(*service, "run", 3);
  Must(late.Begin(0));
  Must(late.Push(0, {ChunkOf("w", 0, 0, gradient)}));
  const v1::StepOutcome outcome = Must(late.Finish(0));
  EXPECT_TRUE(outcome.applied());
  for (int rank = 0; rank < 3; ++rank) {
    RawTrainer trainer(*service, "run", rank);
    EXPECT_EQ(Must(trainer.Finish(0)).SerializeAsString(), outcome.SerializeAsString());
  }
  Must(run.session().Rejoin());
  for (int rank = 1; rank < 4; ++rank) Must(run.session(rank).Rejoin());
  EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(1e-6f), Diagonal(.9177124f, .8780796f)));
}

// Finish may ride ahead of the last push.
TEST(Replicas, APushAfterFinishCompletesTheStep) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Vector("p", 2)}));
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  EXPECT_EQ(trainer.Finish(0, {}, 50).status().code(), absl::StatusCode::kDeadlineExceeded);
  Must(trainer.Push(0, {ChunkOf("p", 0, 0, Bytes({1, 2}))}));
  EXPECT_TRUE(Must(trainer.Finish(0)).applied());
}

TEST(Replicas, ARunThatIsStillOpeningSaysWhoIsMissing) {
  const auto service = StartService();
  const RunSpec spec = SpecOf({Vector("p", 6)}, 3);
  RawTrainer zero(*service, "run", 0);
  const auto reply =
      Must(zero.Register(zero.RegisterRequestOf(spec, CutOf(spec, {Cut::kFlat}, 0))));
  EXPECT_THAT(reply.missing_ranks(), ::testing::ElementsAre(1, 2));
  EXPECT_EQ(reply.position().state(), v1::RUN_STATE_OPENING);
  const absl::Status status = zero.Begin(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << "the client tries again";
  EXPECT_THAT(Message(status), HasSubstr("waiting for ranks [1, 2]"));
}

}  // namespace
}  // namespace muond::cluster
