#include "client/cpp/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/fake_service.h"

namespace muond::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RunSpec Spec(std::int64_t elements = 1000) {
  RunSpec spec;
  spec.name = "r";
  spec.groups.push_back({.name = "g"});
  spec.parameters.push_back({.name = "w", .shape = Dims{elements}, .group = "g"});
  spec.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 1024};
  return spec;
}

RankSlices Slices(std::int64_t elements = 1000) { return {{"w", {WholeBox({elements})}}}; }

v1::RunPosition At(std::int64_t generation, std::int64_t next_step) {
  v1::RunPosition position;
  position.set_generation(generation);
  position.set_next_step(next_step);
  return position;
}

class SessionTest : public testing::Test {
 protected:
  SessionTest() { std::iota(data_.begin(), data_.end(), 0.0f); }

  std::unique_ptr<Session> Open(SessionOptions options = {}) {
    options.channel = server_.channel();
    auto session = Session::Open(Spec(), 0, Slices(), options);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  std::string Bytes() const { return {reinterpret_cast<const char*>(data_.data()), 4000}; }
  void Fail(const std::string& verb, grpc::StatusCode code, const std::string& message = "x",
            std::optional<v1::RunPosition> position = {}, bool after_effect = false) {
    service_.failures[verb].push_back({{code, message}, std::move(position), after_effect});
  }

  FakeServer server_;
  FakeService& service_ = server_.service;
  std::vector<float> data_ = std::vector<float>(1000);
  const std::vector<SliceSource> gradients_ = {{"w", 0, data_.data(), 1000}};
  const StepBegin begin_{.loss_scale = 0};
};

TEST_F(SessionTest, RegistersWhatItWasGiven) {
  const auto session = Open({.session = "trainer-7"});
  EXPECT_EQ(service_.registered.run().name(), "r");
  EXPECT_EQ(service_.registered.session(), "trainer-7");
  EXPECT_EQ(service_.registered.slices(0).boxes(0).size(0), 1000);
  EXPECT_THAT(service_.registered.client(), HasSubstr("muond-client/"));
  EXPECT_EQ(session->loss_scale(), 1024);
  EXPECT_EQ(session->next_step(), 0);
  EXPECT_FALSE(session->last_outcome().has_value());
}

TEST_F(SessionTest, ARejoinedSessionAdoptsWhereTheRunStands) {
  service_.position = At(3, 17);
  service_.position.mutable_last_outcome()->set_step(16);
  service_.position.mutable_last_outcome()->set_next_loss_scale(256);
  const auto session = Open();
  EXPECT_EQ(session->generation(), 3);
  EXPECT_EQ(session->next_step(), 17);
  EXPECT_EQ(session->loss_scale(), 256);
  EXPECT_EQ(session->last_outcome()->step, 16);
}

TEST_F(SessionTest, RegisterIsRepeatedWhileTheDaemonIsUnavailable) {
  Fail("Register", grpc::StatusCode::UNAVAILABLE);
  Fail("Register", grpc::StatusCode::UNAVAILABLE);
  EXPECT_NE(Open(), nullptr);
  EXPECT_EQ(service_.calls["Register"], 3);
}

TEST_F(SessionTest, NoDaemonIsUnavailableWithinTheTimeoutAndNamesTheEndpoint) {
  SessionOptions options;
  options.endpoint = "unix://" + testing::TempDir() + "no-daemon.sock";
  options.call_timeout = absl::Milliseconds(300);
  const absl::Time start = absl::Now();
  const absl::Status status = Session::Open(Spec(), 0, Slices(), options).status();
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("run \"r\": register: no answer from unix:/"),
                    HasSubstr("no-daemon.sock within "), HasSubstr(" attempts): ")));
}

TEST_F(SessionTest, OptionsThatMakeNoSenseAreRefused) {
  for (const SessionOptions& options :
       {SessionOptions{.call_timeout = absl::ZeroDuration()}, SessionOptions{.chunk_bytes = 0},
        SessionOptions{.endpoint = "nonsense"}}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(Session::Open(Spec(), 0, Slices(), options).status()));
  }
}

TEST_F(SessionTest, InitializeSendsChunksNoLargerThanTheDaemonTakes) {
  service_.max_chunk_bytes = 1030;  // not a multiple of an element
  const auto session = Open();
  EXPECT_TRUE(*session->Initialize(gradients_));
  EXPECT_EQ((service_.values[{"w", 0}]), Bytes());
  EXPECT_EQ(service_.largest_chunk, 1028);
}

TEST_F(SessionTest, ARankWithoutSlicesStillInitializes) {
  SessionOptions options;
  options.channel = server_.channel();
  auto session = Session::Open(Spec(), 1, {}, options);
  ASSERT_TRUE(session.ok());
  EXPECT_TRUE(*(*session)->Initialize({}));
  EXPECT_EQ(service_.calls["Initialize"], 1);
}

TEST_F(SessionTest, AStepFillsInNumberAndScaleAndTakesTheNextOnesFromTheOutcome) {
  const auto session = Open();
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied);
  EXPECT_EQ(service_.begun[0].step(), 0);
  EXPECT_EQ(service_.begun[0].loss_scale(), 1024);
  EXPECT_EQ((service_.gradients[{"w", 0}]), Bytes());
  EXPECT_EQ(session->next_step(), 1);
  EXPECT_EQ(session->loss_scale(), 512);
  EXPECT_EQ(session->last_outcome(), *outcome);
  ASSERT_TRUE(session->Step(begin_, gradients_).ok());  // the same gradients: duplicates, silent
  EXPECT_EQ(service_.begun[1].step(), 1);
  EXPECT_EQ(service_.begun[1].loss_scale(), 512);
}

TEST_F(SessionTest, ALostReplyOfFinishIsAskedForAgainAndAppliesOnce) {
  const auto session = Open();
  Fail("Finish", grpc::StatusCode::UNAVAILABLE, "socket closed", {}, true);
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(service_.calls["Finish"], 2);
  EXPECT_EQ(service_.calls["Push"], 1);
  EXPECT_EQ(outcome->step, 0);
  EXPECT_EQ(outcome->applied_steps, 1);
}

TEST_F(SessionTest, AStepThatWasConsumedBeforeIsNotPushedAgain) {
  service_.position = At(1, 5);
  service_.position.mutable_last_outcome()->set_step(4);
  service_.position.mutable_last_outcome()->set_version(5);
  const auto session = Open();
  const auto outcome = session->Step({.step = 4}, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 4);
  EXPECT_EQ(service_.calls["Push"], 0);
}

TEST_F(SessionTest, CorruptedPushesAreSentAgain) {
  const auto session = Open();
  Fail("Push", grpc::StatusCode::DATA_LOSS);
  Fail("Push", grpc::StatusCode::UNAVAILABLE);
  ASSERT_TRUE(session->Step(begin_, gradients_).ok());
  EXPECT_EQ(service_.calls["Push"], 3);
}

TEST_F(SessionTest, ARaisedGenerationRestartsTheStepFromBegin) {
  const auto session = Open();
  service_.position = At(2, 0);
  Fail("Push", grpc::StatusCode::ABORTED, "generation raised", At(2, 0));
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(session->generation(), 2);
  EXPECT_EQ(service_.calls["Register"], 2);
  ASSERT_EQ(service_.begun.size(), 2u);
  EXPECT_EQ(service_.begun[1].id().generation(), 2);
  EXPECT_EQ(service_.finished.id().generation(), 2);
}

TEST_F(SessionTest, ALowerGenerationThatIsRefusedRejoinsToo) {
  const auto session = Open();
  service_.position = At(2, 0);
  Fail("Begin", grpc::StatusCode::FAILED_PRECONDITION, "generation 1 is fenced off", At(2, 0));
  EXPECT_TRUE(session->Step(begin_, gradients_).ok());
  // The same code without a newer generation needs the caller.
  Fail("Begin", grpc::StatusCode::FAILED_PRECONDITION, "expected step 9", At(2, 9));
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Step(begin_, gradients_).status()));
}

TEST_F(SessionTest, ARestoreToAnotherStepIsToldToTheCaller) {
  service_.position = At(1, 9);
  const auto session = Open();
  service_.position = At(2, 7);
  Fail("Finish", grpc::StatusCode::ABORTED, "restored", At(2, 7));
  const absl::Status status = session->Step(begin_, gradients_).status();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("pull version 7 and go on from there"));
  EXPECT_EQ(session->next_step(), 7);
}

TEST_F(SessionTest, FinishLetsTheDaemonsOwnDeadlineErrorArrive) {
  const auto session = Open({.step_timeout = absl::Seconds(2)});
  service_.hang_finish = true;
  const absl::Status status = session->Step(begin_, gradients_).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_EQ(status.message(), "run \"r\": step 0: rank 1 has not finished");
}

TEST_F(SessionTest, FinishWaitsALittleLessThanItsDeadline) {
  const auto session = Open({.step_timeout = absl::Seconds(60)});
  ASSERT_TRUE(session->Step(begin_, gradients_).ok());
  EXPECT_LE(service_.finished.wait_ms(), 59'000);
  EXPECT_GE(service_.finished.wait_ms(), 50'000);
  EXPECT_GT(service_.finish_deadline_ms, service_.finished.wait_ms());
}

TEST_F(SessionTest, InputThatDoesNotFitIsRefusedBeforeAnythingIsSent) {
  const auto session = Open();
  const std::vector<SliceSource> wrong = {{"w", 0, data_.data(), 999}};
  const std::vector<SliceSource> unknown = {{"v", 0, data_.data(), 1000}};
  EXPECT_TRUE(absl::IsInvalidArgument(session->Initialize(wrong).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(session->Step(begin_, wrong).status()));
  EXPECT_TRUE(absl::IsNotFound(session->Step(begin_, unknown).status()));
  EXPECT_TRUE(absl::IsNotFound(session->Step(begin_, gradients_, {"v"}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Push(gradients_)));
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Finish().status()));
  for (const char* verb : {"Initialize", "Begin", "Push", "Finish"}) {
    EXPECT_EQ(service_.calls[verb], 0) << verb;
  }
}

TEST_F(SessionTest, ThePiecesOfAStepMakeTheSameStep) {
  const auto session = Open();
  ASSERT_TRUE(session->Begin({.step = 0, .loss_scale = 8, .micro_batches = 2}).ok());
  const std::vector<SliceSource> second = {{"w", 0, data_.data(), 1000, Dtype::kF32, 1}};
  ASSERT_TRUE(session->Push(gradients_).ok());
  ASSERT_TRUE(session->Push(second).ok());
  const auto outcome = session->Finish({"w"});
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(service_.begun[0].loss_scale(), 8);
  EXPECT_EQ(service_.finished.absent(0), "w");
}

TEST_F(SessionTest, CancelEndsAPushUnderWayAndWhatIsQueuedBehindIt) {
  const auto session = Open();
  service_.hold = {"Push"};
  for (int i = 0; i < 10; ++i) {
    service_.held = 0;
    ASSERT_TRUE(session->Begin(begin_).ok());
    const auto first = session->PushAsync(gradients_);
    ASSERT_TRUE(first.ok());
    while (service_.held == 0) absl::SleepFor(absl::Milliseconds(1));
    const auto second = session->PushAsync(gradients_);
    ASSERT_TRUE(second.ok());
    session->Cancel();
    const absl::Status told = (*second)->Wait(absl::Seconds(20));
    if (absl::IsDeadlineExceeded(told)) session->Cancel();  // for the test to come to an end
    ASSERT_TRUE(absl::IsCancelled(told)) << told;
    EXPECT_TRUE(absl::IsCancelled((*first)->Wait(absl::Seconds(20))));
    EXPECT_TRUE(absl::IsCancelled(session->Finish().status()));
    EXPECT_EQ(service_.held, 1);
  }
  service_.hold = {};
  EXPECT_TRUE(session->Step(begin_, gradients_).ok()) << "later calls work";
}

TEST_F(SessionTest, SkipTellsCauseAndScale) {
  const auto session = Open();
  const auto outcome = session->Skip(SkipCause::kOverflow, 4096);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->cause, SkipCause::kOverflow);
  EXPECT_EQ(outcome->loss_scale, 4096);
  EXPECT_EQ(session->next_step(), 1);
}

TEST_F(SessionTest, ACloseWhoseReplyWasLostIsClosed) {
  const auto session = Open();
  Fail("Close", grpc::StatusCode::UNAVAILABLE, "socket closed", {}, true);
  Fail("Close", grpc::StatusCode::NOT_FOUND, "run \"r\": no such run");
  const auto closed = session->Close();
  ASSERT_TRUE(closed.ok()) << closed.status();
  EXPECT_TRUE(*closed);
  Fail("Close", grpc::StatusCode::NOT_FOUND, "run \"r\": no such run");
  EXPECT_TRUE(absl::IsNotFound(session->Close().status()));
}

TEST(SessionOverTcp, ControlAndBulkHaveConnectionsOfTheirOwn) {
  FakeServer server(true);
  constexpr std::int64_t kElements = 1'300'001;  // several chunks, the last one odd
  SessionOptions options;
  options.endpoint = server.endpoint();
  auto session = Session::Open(Spec(kElements), 0, Slices(kElements), options);
  ASSERT_TRUE(session.ok()) << session.status();
  std::vector<float> values(kElements);
  std::iota(values.begin(), values.end(), 0.0f);
  const SliceSource source[] = {{"w", 0, values.data(), kElements}};
  ASSERT_TRUE(*(*session)->Initialize(source));
  ASSERT_TRUE((*session)->Step({.loss_scale = 0}, source).ok());
  std::vector<float> back(kElements, -1.0f);
  const SliceSink sink[] = {{"w", 0, back.data(), kElements}};
  const absl::Status pulled = (*session)->Pull(1, sink);
  ASSERT_TRUE(pulled.ok()) << pulled;
  EXPECT_EQ(back, values);
  auto& peers = server.service.peers;
  EXPECT_NE(peers["Push"], peers["Finish"]);
  EXPECT_EQ(peers["Push"], peers["Pull"]);
  EXPECT_EQ(peers["Begin"], peers["Finish"]);
  // Nor do two sessions of one process share any.
  const auto first = peers;
  auto second = Session::Open(Spec(kElements), 0, Slices(kElements), options);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE((*second)->Step({.loss_scale = 0}, source).ok());
  EXPECT_NE(peers["Push"], first.at("Push"));
  EXPECT_NE(peers["Finish"], first.at("Finish"));
}

}  // namespace
}  // namespace muond::client
