// A step is applied once, however often and in whatever state its trainer asks for it.
#include <atomic>
#include <cmath>
#include <map>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

const Floats kIdentity = {1, 0, 0, 1};
const Floats kGradient = {3, 0, 0, 4};
const Floats kOneStep = {.9177124f, 0, 0, .8780796f};

RunSpec Spec() { return SpecOf({Matrix("w", 2, 2)}); }

double Duplicates(Service& service) {
  return ParseExposition(service.Metrics()).at("muond_duplicate_requests_total{run=\"run\"}");
}

// UNAVAILABLE may come after the daemon has applied the call.
TEST(ExactlyOnce, Grpc18761_ALostFinishReplyAppliesNothingTwice) {
  const auto service = StartService({.threads = 1, .fault_points = "drop_finish_reply:0:2"});
  TestRun run(*service, Spec(), {.initial = {{"w", kIdentity}}});
  const StepOutcome outcome = run.Step({{"w", kGradient}});
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(outcome.applied_steps, 1);
  EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(1e-6f), kOneStep));
  EXPECT_EQ(run.Status().steps_applied(), 1);
  EXPECT_EQ(Duplicates(*service), 2);
}

TEST(ExactlyOnce, ALostPushReplyIsPushedAgain) {
  const auto service = StartService({.threads = 1, .fault_points = "drop_push_reply:0:3"});
  TestRun run(*service, Spec(), {.initial = {{"w", kIdentity}}});
  EXPECT_TRUE(run.Step({{"w", kGradient}}).applied);
  EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(1e-6f), kOneStep));
  EXPECT_EQ(Duplicates(*service), 3);
}

TEST(ExactlyOnce, ALostReplyOfASkipSkipsOnce) {
  const auto service = StartService({.threads = 1, .fault_points = "drop_finish_reply:0:1"});
  RunSpec spec = Spec();
  spec.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 4};
  TestRun run(*service, spec);
  const StepOutcome outcome = run.Step({{"w", {INFINITY, 0, 0, 0}}});
  EXPECT_EQ(outcome.cause, SkipCause::kOverflow);
  EXPECT_EQ(outcome.next_loss_scale, 2) << "one overflow, one backoff";
  EXPECT_EQ(run.Status().steps_skipped().at("overflow"), 1);
}

TEST(ExactlyOnce, RepeatsOfAConsumedStepGetItsFirstAnswer) {
  const auto service = StartService();
  TestRun run(*service, Spec(), {.initial = {{"w", kIdentity}}});
  RawTrainer trainer(*service, "run");
  const std::vector<v1::Chunk> chunks = {ChunkOf("w", 0, 0, Bytes(kGradient))};
  Must(trainer.Begin(0));
  Must(trainer.Push(0, chunks));
  const v1::StepOutcome first = Must(trainer.Finish(0));
  const v1::DigestReply after = run.Digest();

  EXPECT_EQ(Must(trainer.Finish(0)).SerializeAsString(), first.SerializeAsString());
  EXPECT_EQ(Must(trainer.Finish(0, {"w"})).SerializeAsString(), first.SerializeAsString());
  Must(trainer.Begin(0));
  const v1::PushReply again = Must(trainer.Push(0, chunks));
  EXPECT_EQ(again.slices_accepted(), 0);
  EXPECT_EQ(again.slices_duplicate(), 1);
  const absl::Status other = trainer.Push(0, {ChunkOf("w", 0, 0, Bytes({9, 9, 9, 9}))}).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(other.message()), HasSubstr("parameter \"w\": push for step 0"));
  EXPECT_EQ(run.Digest().SerializeAsString(), after.SerializeAsString());
}

TEST(ExactlyOnce, RepeatsWithinAStepCountOnce) {
  const auto service = StartService();
  TestRun run(*service, Spec(), {.initial = {{"w", kIdentity}}});
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  Must(trainer.Begin(0));
  const std::vector<v1::Chunk> chunks = ChunksOf("w", 0, Bytes(kGradient), 4);
  EXPECT_EQ(Must(trainer.Push(0, chunks)).slices_accepted(), 1);
  EXPECT_EQ(Must(trainer.Push(0, chunks)).slices_duplicate(), 1);
  EXPECT_EQ(Must(trainer.Push(0, {ChunkOf("w", 0, 0, Bytes(kGradient))})).slices_duplicate(), 1)
      << "in other chunks";
  EXPECT_EQ(trainer.Push(0, {ChunkOf("w", 0, 0, Bytes({3, 0, 0, 5}))}).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Must(trainer.Finish(0)).applied());
  Must(run.session().Rejoin());
  EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(1e-6f), kOneStep));
}

TEST(ExactlyOnce, AStepLongGoneIsRefusedWithThePosition) {
  const auto service = StartService();
  TestRun run(*service, Spec());
  run.Step({{"w", kGradient}});
  run.Step({{"w", kGradient}});
  RawTrainer trainer(*service, "run");
  const std::string before = run.TensorDigest();
  for (const absl::Status& status :
       {trainer.Begin(0), trainer.Finish(0).status(),
        trainer.Push(0, {ChunkOf("w", 0, 0, Bytes(kGradient))}).status(),
        trainer.Skip(0, v1::SKIP_CAUSE_TRAINER).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("behind: expected step 2 of generation 1"));
    ASSERT_TRUE(trainer.position().has_value());
    EXPECT_EQ(trainer.position()->next_step(), 2);
    EXPECT_EQ(trainer.position()->last_outcome().step(), 1);
  }
  EXPECT_EQ(run.TensorDigest(), before);
}

TEST(ExactlyOnce, ARestartedTrainerLearnsWhetherItsStepWasApplied) {
  const auto service = StartService();
  RunSpec spec = Spec();
  spec.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 4, .window = 1};
  TestRun run(*service, spec, {.initial = {{"w", kIdentity}}});
  const StepOutcome outcome = run.Step({{"w", kGradient}});
  // The trainer dies here, its successor comes under the same session name.
  auto successor =
      Must(client::Session::Open(spec, 0, run.slices(0), {.channel = service->channel()}));
  EXPECT_TRUE(successor->registered().rejoined());
  ASSERT_TRUE(successor->last_outcome().has_value());
  EXPECT_EQ(*successor->last_outcome(), outcome);
  EXPECT_EQ(successor->next_step(), 1);
  EXPECT_EQ(successor->loss_scale(), 8);
  EXPECT_EQ(run.Status().position().next_step(), 1);
  const Floats scaled = {8, 0, 0, 8};
  EXPECT_TRUE(Must(successor->Step({.loss_scale = 0},
                                   {{{.parameter = "w", .data = scaled.data(), .elements = 4}}}))
                  .applied);
}

// A trainer that died in the middle of a slice leaves nothing behind; its successor sends it whole.
TEST(ExactlyOnce, HalfASliceIsReplacedByTheNextStream) {
  const auto service = StartService();
  TestRun run(*service, Spec(), {.initial = {{"w", kIdentity}}});
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  EXPECT_FALSE(trainer.Push(0, {ChunkOf("w", 0, 0, Bytes({99, 99, 99}))}).ok());
  EXPECT_TRUE(run.Step({{"w", kGradient}}).applied);
  EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(1e-6f), kOneStep));
}

TEST(ExactlyOnce, AStreamWithoutSlicesIsNoError) {
  const auto service = StartService();
  TestRun run(*service, Spec());
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  const v1::PushReply reply = Must(trainer.Push(0, {}));
  EXPECT_EQ(reply.slices_accepted() + reply.slices_duplicate(), 0);
  EXPECT_TRUE(run.Step({{"w", kGradient}}).applied);
}

TEST(ExactlyOnce, InitialValuesMayBeSentAgainButNotOthers) {
  const auto service = StartService();
  const RunSpec spec = SpecOf({Vector("a", 2), Vector("b", 2)});
  RawTrainer trainer(*service, "run");
  const v1::RegisterRequest request = trainer.RegisterRequestOf(spec, CutOf(spec, {}, 0));
  EXPECT_FALSE(Must(trainer.Register(request)).rejoined());
  EXPECT_TRUE(Must(trainer.Register(request)).rejoined()) << "the same registration again";
  const v1::InitializeReply half = Must(trainer.Initialize({ChunkOf("a", 0, 0, Bytes({1, 2}))}));
  EXPECT_FALSE(half.complete());
  EXPECT_THAT(half.missing(), ::testing::ElementsAre("b"));
  EXPECT_EQ(trainer.Initialize({ChunkOf("a", 0, 0, Bytes({1, 3}))}).status().code(),
            absl::StatusCode::kAlreadyExists);
  const v1::InitializeReply all = Must(
      trainer.Initialize({ChunkOf("a", 0, 0, Bytes({1, 2})), ChunkOf("b", 0, 0, Bytes({3, 4}))}));
  EXPECT_TRUE(all.complete());
  EXPECT_EQ(all.slices_duplicate(), 1);
  EXPECT_EQ(all.slices_accepted(), 1);
}

// Nanochat #843, Megatron #6492: a pull is of one version or refused, whatever runs beside it.
TEST(ExactlyOnce, Megatron6492_APullNeverMixesTwoVersions) {
  const auto service = StartService();
  const RunSpec spec = SpecOf({Matrix("w", 64, 64), Vector("p", 5000)});
  TestRun run(*service, spec, {.chunk_bytes = 1024});
  std::map<std::int64_t, Tensors> weights = {{0, run.Weights()}};
  std::atomic<std::int64_t> version{0};
  std::atomic<bool> done{false};
  std::atomic<int> whole{0}, refused{0};
  struct Pulled {
    std::int64_t version;
    Floats w;
  };
  std::vector<Pulled> pulled;
  std::thread puller([&] {
    RawTrainer trainer(*service, "run");
    while (!done) {
      v1::PullRequest request;
      *request.mutable_id() = trainer.id();
      request.set_version(version);
      request.set_chunk_bytes(2048);
      request.set_master(true);
      const auto replies = trainer.Pull(request);
      if (!replies.ok()) {
        EXPECT_TRUE(absl::IsAborted(replies.status()) ||
                    absl::IsFailedPrecondition(replies.status()))
            << replies.status();
        ++refused;
        continue;
      }
      Pulled& one = pulled.emplace_back(Pulled{request.version(), {}});
      for (const v1::PullReply& reply : *replies) {
        if (reply.chunk().parameter() != "w") continue;
        const auto* data = reinterpret_cast<const float*>(reply.chunk().data().data());
        one.w.insert(one.w.end(), data, data + reply.chunk().data().size() / 4);
      }
      ++whole;
    }
  });
  for (std::uint64_t step = 0; step < 5000 && (whole < 10 || refused < 10); ++step) {
    version = run.Step(NoiseFor(spec, step)).version;
    weights[version] = run.Weights();
  }
  done = true;
  puller.join();
  EXPECT_GE(whole, 1);
  EXPECT_GE(refused, 1);
  for (const Pulled& one : pulled) EXPECT_EQ(one.w, weights.at(one.version).at("w")) << one.version;
}

}  // namespace
}  // namespace muond::cluster
