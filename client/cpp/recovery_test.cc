#include "client/cpp/recovery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/fake_service.h"

namespace muond::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Phase = Interruption::Phase;

v1::RunPosition At(std::int64_t generation, std::int64_t next_step,
                   v1::RunState state = v1::RUN_STATE_RUNNING) {
  v1::RunPosition position;
  position.set_generation(generation);
  position.set_next_step(next_step);
  position.set_state(state);
  if (state == v1::RUN_STATE_NEEDS_RESTORE) position.set_resume_step(next_step);
  return position;
}

v1::RunPosition Lost(std::int64_t generation, std::int64_t next_step) {
  return At(generation, next_step, v1::RUN_STATE_NEEDS_RESTORE);
}

class RecoveryTest : public testing::Test {
 protected:
  RecoveryTest() {
    std::iota(data_.begin(), data_.end(), 0.0f);
    spec_.name = "r";
    spec_.groups.push_back({.name = "g"});
    spec_.parameters.push_back({.name = "w", .shape = Dims{1000}, .group = "g"});
    options_.channel = server_.channel();
    options_.call_timeout = absl::Seconds(10);
    options_.on_interruption = [this](const Interruption& told) {
      phases_.push_back(told.phase);
      told_.push_back(told);
    };
    service_.position = At(1, 7);
  }
  std::unique_ptr<Session> Open() {
    auto session = Session::Open(spec_, 0, {{"w", {WholeBox({1000})}}}, options_);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  void Fail(const std::string& verb, grpc::StatusCode code, const std::string& message = "x",
            std::optional<v1::RunPosition> position = {}) {
    service_.failures[verb].push_back({{code, message}, std::move(position), false});
  }

  // What `call` returns when another thread cancels until it does, whenever it begins.
  static absl::Status Cancelling(Session& session, const std::function<absl::Status()>& call) {
    std::atomic<bool> done = false;
    std::thread other([&] {
      while (!done) {
        absl::SleepFor(absl::Milliseconds(20));
        session.Cancel();
      }
    });
    absl::Status status = call();
    done = true;
    other.join();
    return status;
  }

  FakeServer server_;
  FakeService& service_ = server_.service;
  RunSpec spec_;
  SessionOptions options_;
  std::vector<Phase> phases_;
  std::vector<Interruption> told_;
  std::vector<float> data_ = std::vector<float>(1000);
  const std::vector<SliceSource> gradients_ = {{"w", 0, data_.data(), 1000}};
  const StepBegin begin_{.loss_scale = 0};
  const ParameterAddition late_ = {
      .groups = {},
      .parameters = {{.name = "late", .shape = Dims{4}, .group = "g"}},
      .slices = {{"late", {WholeBox({4})}}}};
};

TEST_F(RecoveryTest, ADaemonThatKnowsTheRunNoMoreIsAwaitedUntilItIsRestored) {
  const auto session = Open();
  Fail("Finish", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  service_.later = {Lost(1, 7), Lost(1, 7), At(2, 7)};
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 7);
  EXPECT_EQ(session->generation(), 2);
  EXPECT_EQ(service_.calls["Register"], 4);
  EXPECT_EQ(service_.calls["Push"], 2) << "the whole step is taken again";
  EXPECT_THAT(phases_, ElementsAre(Phase::kBegun, Phase::kLasting, Phase::kOver));
  EXPECT_THAT(Describe(told_[0]),
              HasSubstr("run \"r\": rank 0: step 7 was interrupted, rejoining for at most 5m: run "
                        "\"r\": there is no such run"));
  EXPECT_THAT(Describe(told_[1]), AllOf(HasSubstr("is interrupted still, after "),
                                        HasSubstr("needs a restore before step 7")));
  EXPECT_THAT(Describe(told_[2]), AllOf(HasSubstr("step 7 is done after an interruption of "),
                                        HasSubstr("attempt 2, generation 2")));
}

TEST_F(RecoveryTest, ARunThatNeedsARestoreIsAwaited) {
  const auto session = Open();
  Fail("Begin", grpc::StatusCode::FAILED_PRECONDITION, "needs a restore", Lost(1, 7));
  service_.later = {Lost(1, 7), At(2, 7)};
  EXPECT_TRUE(session->Step(begin_, gradients_).ok());
  EXPECT_EQ(service_.begun.size(), 1u);
  EXPECT_EQ(service_.begun[0].id().generation(), 2);
}

TEST_F(RecoveryTest, DaemonsThatAreAwayForLongerThanACallAreAwaited) {
  options_.call_timeout = absl::Seconds(1);
  const auto session = Open();
  for (int i = 0; i < 9; ++i) Fail("Begin", grpc::StatusCode::UNAVAILABLE, "gone");
  for (int i = 0; i < 3; ++i) Fail("Register", grpc::StatusCode::UNAVAILABLE, "gone");
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_THAT(phases_, testing::Contains(Phase::kOver));
}

TEST_F(RecoveryTest, ItIsGivenUpAtItsDeadlineWithTheLastCause) {
  options_.recovery_timeout = absl::Milliseconds(600);
  const auto session = Open();
  Fail("Begin", grpc::StatusCode::FAILED_PRECONDITION, "needs a restore", Lost(1, 7));
  service_.later = {Lost(1, 7)};
  const absl::Time start = absl::Now();
  const absl::Status status = session->Step(begin_, gradients_).status();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("needs a restore before step 7"));
  EXPECT_EQ(phases_.back(), Phase::kGivenUp);
  EXPECT_THAT(Describe(told_.back()), HasSubstr("step 7 is given up after "));
}

TEST_F(RecoveryTest, WithoutTimeForItTheFirstFailureIsReturned) {
  options_.recovery_timeout = absl::ZeroDuration();
  const auto session = Open();
  Fail("Begin", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  EXPECT_TRUE(absl::IsNotFound(session->Step(begin_, gradients_).status()));
  EXPECT_EQ(service_.calls["Register"], 1);
  EXPECT_THAT(phases_, IsEmpty());
}

TEST_F(RecoveryTest, LostStateWithoutACheckpointIsToldAtOnce) {
  const auto session = Open();
  Fail("Push", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  service_.later = {At(1, 0, v1::RUN_STATE_OPENING)};
  const absl::Status status = session->Step(begin_, gradients_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("lost its state and there is no checkpoint"),
                    HasSubstr("Reinitialize")));
}

// The run opens once more when parameters are added, and has lost nothing.
TEST_F(RecoveryTest, ValuesOfParametersThatWereAddedAreWaitedFor) {
  const auto of = [](v1::RunState state, std::int64_t lineage) {
    v1::RunPosition position = At(2, 7, state);
    position.set_lineage(lineage);
    return position;
  };
  service_.position = of(v1::RUN_STATE_RUNNING, 1);
  service_.additions = {1};
  const auto session = Open();
  Fail("Begin", grpc::StatusCode::UNAVAILABLE, "a connection was reset");
  Fail("Begin", grpc::StatusCode::ABORTED, "elsewhere");
  service_.later = {of(v1::RUN_STATE_OPENING, 1), of(v1::RUN_STATE_RUNNING, 1)};
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_THAT(Describe(told_[1]), HasSubstr("parameters that were added are there yet"));
  // State of another lineage is not what it was.
  Fail("Begin", grpc::StatusCode::ABORTED, "elsewhere");
  service_.later = {of(v1::RUN_STATE_OPENING, 2)};
  EXPECT_THAT(session->Step(begin_, gradients_).status().ToString(), HasSubstr("lost its state"));
}

TEST_F(RecoveryTest, AnOlderCheckpointIsToldToTheCaller) {
  const auto session = Open();
  Fail("Push", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  service_.later = {Lost(1, 7), At(2, 5)};
  const absl::Status status = session->Step(begin_, gradients_).status();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("pull version 5 and go on from there"));
  EXPECT_EQ(session->next_step(), 5);
  EXPECT_EQ(phases_.back(), Phase::kGivenUp);
}

TEST_F(RecoveryTest, AStepThatWasConsumedMeanwhileIsNotTakenAgain) {
  const auto session = Open();
  Fail("Finish", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  v1::RunPosition after = At(2, 8);
  after.mutable_last_outcome()->set_step(7);
  after.mutable_last_outcome()->set_version(8);
  service_.later = {Lost(1, 8), after};
  const auto outcome = session->Step(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->version, 8);
  EXPECT_EQ(service_.calls["Finish"], 1);
  EXPECT_EQ(phases_.back(), Phase::kOver);
}

TEST_F(RecoveryTest, WhatIsReallyNotThereIsSaid) {
  const auto session = Open();
  for (int i = 0; i < 9; ++i) {
    Fail("Begin", grpc::StatusCode::NOT_FOUND, "group \"h\": no such group", At(1, 7));
  }
  const absl::Status status = session->Step(begin_, gradients_).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_LE(service_.calls["Begin"], 4);
}

TEST_F(RecoveryTest, RefusalsThatAreTheCallersAreReturnedAtOnce) {
  const auto session = Open();
  for (const auto code : {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::ALREADY_EXISTS,
                          grpc::StatusCode::RESOURCE_EXHAUSTED,
                          grpc::StatusCode::PERMISSION_DENIED}) {
    Fail("Begin", code);
    EXPECT_FALSE(session->Step(begin_, gradients_).ok());
  }
  Fail("Begin", grpc::StatusCode::UNAVAILABLE, "opening", At(1, 7, v1::RUN_STATE_OPENING));
  EXPECT_TRUE(session->Step(begin_, gradients_).ok()) << "repeated, as ever";
  EXPECT_EQ(service_.calls["Register"], 1);
  EXPECT_THAT(phases_, IsEmpty());
}

TEST_F(RecoveryTest, CancelEndsIt) {
  const auto session = Open();
  Fail("Begin", grpc::StatusCode::FAILED_PRECONDITION, "needs a restore", Lost(1, 7));
  service_.later = {Lost(1, 7)};
  EXPECT_TRUE(absl::IsCancelled(
      Cancelling(*session, [&] { return session->Step(begin_, gradients_).status(); })));
  service_.position = At(1, 7);
  EXPECT_TRUE(session->Step(begin_, gradients_).ok()) << "later calls work";
}

TEST_F(RecoveryTest, CancelEndsAnAdditionThatWaitsForOtherRanks) {
  const auto session = Open();
  service_.hold = {"AddParameters"};
  EXPECT_TRUE(absl::IsCancelled(
      Cancelling(*session, [&] { return session->AddParameters(late_); })));
  EXPECT_GE(service_.held, 1);
  service_.hold = {};
  EXPECT_TRUE(session->Step(begin_, gradients_).ok()) << "later calls work";
}

// Another rank was first, and this one's question is overtaken by what it asks for: the run opens
// once more, for values that nobody but this rank will send.
TEST_F(RecoveryTest, AnAdditionThatTheAdoptionOvertakesIsAskedForAgain) {
  options_.recovery_timeout = absl::Seconds(3);
  service_.adopted = true;
  for (const bool first : {true, false}) {
    SCOPED_TRACE(first ? "of the first addition" : "of a later one");
    v1::RunPosition running = At(2, 7), opening = At(3, 7, v1::RUN_STATE_OPENING);
    running.set_lineage(1);
    opening.set_lineage(1);
    service_.position = running;
    service_.additions.clear();
    if (!first) service_.additions.push_back(1);
    service_.calls.clear();
    const auto session = Open();
    Fail("AddParameters", grpc::StatusCode::ABORTED, "the generation was raised", opening);
    service_.later = {opening};
    const absl::Status added = session->AddParameters(late_);
    EXPECT_TRUE(added.ok()) << added;
    EXPECT_EQ(service_.calls["AddParameters"], 2);
    EXPECT_EQ(session->state(), v1::RUN_STATE_OPENING) << "it is for the caller to send values";
  }
  // A run that is new has no values of the old ones either.
  const auto session = Open();
  service_.position = At(1, 0, v1::RUN_STATE_OPENING);
  Fail("AddParameters", grpc::StatusCode::ABORTED, "the generation was raised");
  EXPECT_THAT(session->AddParameters(late_).ToString(), HasSubstr("lost its state"));
}

TEST_F(RecoveryTest, CompleteTakesAnInterruptedStepAgainFromTheStart) {
  const auto session = Open();
  ASSERT_TRUE(session->Begin(begin_).ok());
  Fail("Push", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  service_.later = {Lost(1, 7), At(2, 7)};
  const auto ticket = session->PushAsync(gradients_);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(absl::IsNotFound((*ticket)->Wait(absl::Seconds(10))));
  const auto outcome = session->Complete(begin_, gradients_);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(service_.begun.size(), 2u);
  EXPECT_EQ(service_.begun[1].id().generation(), 2);
  EXPECT_EQ(service_.calls["Push"], 2);
  EXPECT_EQ(outcome->step, 7);
}

TEST_F(RecoveryTest, CompleteOnlyFinishesWhatNothingHasHappenedTo) {
  const auto session = Open();
  ASSERT_TRUE(session->Begin(begin_).ok());
  ASSERT_TRUE(session->PushAsync(gradients_).ok());
  ASSERT_TRUE(session->Complete(begin_, gradients_).ok());
  EXPECT_EQ(service_.begun.size(), 1u);
  EXPECT_EQ(service_.calls["Push"], 1);
}

TEST_F(RecoveryTest, CompleteAlsoMendsAPieceWhoseErrorTheCallerHasHeard) {
  const auto session = Open();
  ASSERT_TRUE(session->Begin(begin_).ok());
  Fail("Push", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  EXPECT_FALSE(session->Push(gradients_).ok());
  service_.position = At(1, 7);
  ASSERT_TRUE(session->Complete(begin_, gradients_).ok());
  EXPECT_EQ(service_.begun.size(), 2u) << "without its push the daemon would wait for ever";
}

TEST_F(RecoveryTest, PullAndSkipRecoverToo) {
  const auto session = Open();
  std::vector<float> back(1000);
  const SliceSink sink[] = {{"w", 0, back.data(), 1000}};
  ASSERT_TRUE(session->Step(begin_, gradients_).ok());
  Fail("Pull", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  service_.later = {Lost(1, 8), At(2, 8)};
  (void)session->Pull(8, sink);  // the fake has no values to give
  EXPECT_EQ(service_.calls["Pull"], 2);
  EXPECT_EQ(session->generation(), 2);
  Fail("Pull", grpc::StatusCode::NOT_FOUND, "run \"r\": there is no such run");
  service_.later = {At(3, 6)};
  EXPECT_TRUE(absl::IsAborted(session->Pull(8, sink)));
  Fail("Skip", grpc::StatusCode::ABORTED, "raised");
  service_.later = {At(4, 6)};
  EXPECT_TRUE(session->Skip(SkipCause::kTrainer, 1).ok());
  EXPECT_EQ(service_.calls["Skip"], 2);
}

TEST_F(RecoveryTest, ADaemonOfAVersionTooFarAwayIsRefused) {
  service_.version = "0.9.0";
  const auto session = Session::Open(spec_, 0, {{"w", {WholeBox({1000})}}}, options_);
  EXPECT_TRUE(absl::IsFailedPrecondition(session.status())) << session.status();
  EXPECT_THAT(std::string(session.status().message()),
              AllOf(HasSubstr("run \"r\": register: daemon \"in-process\" has version 0.9.0"),
                    HasSubstr("upgrade this one")));
  EXPECT_FALSE(service_.registered.version().empty()) << "the daemon judges, too";
}

}  // namespace
}  // namespace muond::client
