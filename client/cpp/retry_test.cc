#include "client/cpp/retry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/random/random.h"

namespace muond::client {
namespace {

using ::testing::HasSubstr;

// Time that passes only by sleeping.
struct FakeTime {
  absl::Time now = absl::UnixEpoch();
  std::vector<absl::Duration> sleeps;
  RetryClock Clock() {
    return {.now = [this] { return now; },
            .sleep =
                [this](absl::Duration d) {
                  sleeps.push_back(d);
                  now += d;
                }};
  }
};

RetryPlan Plan(absl::Duration timeout, CallKind kind = CallKind::kControl) {
  return {.what = "run \"r\": finish step 3",
          .peer = "unix:/p",
          .kind = kind,
          .timeout = timeout,
          .generation = 4};
}

TEST(WorthRepeating, FollowsTheProtocolsTable) {
  const auto repeats = [](absl::StatusCode code, CallKind kind = CallKind::kControl) {
    return WorthRepeating({absl::Status(code, ""), std::nullopt}, kind, 4, 1);
  };
  EXPECT_TRUE(repeats(absl::StatusCode::kUnavailable));
  EXPECT_TRUE(repeats(absl::StatusCode::kCancelled));
  EXPECT_TRUE(repeats(absl::StatusCode::kDataLoss));
  EXPECT_FALSE(repeats(absl::StatusCode::kAborted));
  EXPECT_TRUE(repeats(absl::StatusCode::kAborted, CallKind::kStream));
  for (const auto code :
       {absl::StatusCode::kInvalidArgument, absl::StatusCode::kFailedPrecondition,
        absl::StatusCode::kNotFound, absl::StatusCode::kAlreadyExists,
        absl::StatusCode::kResourceExhausted, absl::StatusCode::kDeadlineExceeded,
        absl::StatusCode::kInternal, absl::StatusCode::kUnimplemented}) {
    EXPECT_FALSE(repeats(code)) << absl::StatusCodeToString(code);
    EXPECT_FALSE(repeats(code, CallKind::kStream)) << absl::StatusCodeToString(code);
  }
}

TEST(WorthRepeating, AnAbortedStreamOfAnOlderGenerationIsNot) {
  CallResult result{absl::AbortedError(""), v1::RunPosition()};
  result.position->set_generation(4);
  EXPECT_TRUE(WorthRepeating(result, CallKind::kStream, 4, 1));
  result.position->set_generation(5);
  EXPECT_FALSE(WorthRepeating(result, CallKind::kStream, 4, 1));
}

TEST(BackoffDelay, DoublesUpToASecondWithJitterOfAHalf) {
  absl::BitGen random;
  double whole = 20;
  for (int attempts = 1; attempts < 70; ++attempts) {
    const double ms = absl::ToDoubleMilliseconds(BackoffDelay(attempts, random));
    EXPECT_GE(ms, whole / 2) << attempts;
    EXPECT_LE(ms, whole) << attempts;
    whole = std::min(whole * 2, 1000.0);
  }
}

TEST(CallWithRetries, RepeatsUntilItWorks) {
  FakeTime time;
  int calls = 0;
  const CallResult result = CallWithRetries(
      Plan(absl::Seconds(10)),
      [&](const Attempt& attempt) {
        EXPECT_EQ(attempt.number, ++calls);
        EXPECT_EQ(attempt.deadline, absl::UnixEpoch() + absl::Seconds(10));
        return CallResult{calls < 4 ? absl::UnavailableError("gone") : absl::OkStatus(), {}};
      },
      time.Clock());
  EXPECT_TRUE(result.status.ok());
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(time.sleeps.size(), 3u);
}

TEST(CallWithRetries, GivesUpBeforeTheDeadlineAndSaysWhatWhoAndHowOften) {
  FakeTime time;
  int calls = 0;
  const CallResult result = CallWithRetries(
      Plan(absl::Seconds(3)),
      [&](const Attempt&) {
        ++calls;
        return CallResult{absl::UnavailableError("connection refused"), {}};
      },
      time.Clock());
  EXPECT_TRUE(absl::IsUnavailable(result.status));
  EXPECT_LT(time.now, absl::UnixEpoch() + absl::Seconds(3));
  EXPECT_GT(calls, 5);
  const std::string message(result.status.message());
  EXPECT_THAT(message, HasSubstr("run \"r\": finish step 3: no answer from unix:/p within "));
  EXPECT_THAT(message, HasSubstr("(" + std::to_string(calls) + " attempts): connection refused"));
}

// Somebody else is away, and the daemon that was asked says so, until there is no time to say it.
TEST(CallWithRetries, AnAttemptWithoutTimeDoesNotHideWhatWasSaidBefore) {
  FakeTime time;
  const CallResult result = CallWithRetries(
      Plan(absl::Seconds(3)),
      [&](const Attempt& attempt) {
        if (time.now < attempt.deadline - absl::Seconds(1)) {
          return CallResult{absl::UnavailableError("daemon \"b\" is out of reach"),
                            v1::RunPosition()};
        }
        time.now = attempt.deadline;
        return CallResult{absl::DeadlineExceededError("Deadline Exceeded"), {}};
      },
      time.Clock());
  EXPECT_TRUE(absl::IsUnavailable(result.status)) << result.status;
  EXPECT_TRUE(result.position.has_value());
  EXPECT_THAT(std::string(result.status.message()),
              ::testing::AllOf(HasSubstr("finish step 3: still refused by unix:/p within 3s ("),
                               HasSubstr("attempts): daemon \"b\" is out of reach")));
}

TEST(CallWithRetries, ReturnsTheDaemonsRefusalAsItIs) {
  FakeTime time;
  int calls = 0;
  const absl::Status refusal = absl::DeadlineExceededError("step 3: rank 1 has not finished");
  const CallResult result = CallWithRetries(
      Plan(absl::Seconds(3)),
      [&](const Attempt&) {
        ++calls;
        return CallResult{refusal, v1::RunPosition()};
      },
      time.Clock());
  EXPECT_EQ(result.status, refusal);
  EXPECT_TRUE(result.position.has_value());
  EXPECT_EQ(calls, 1);
}

TEST(CallWithRetries, DataLossIsRepeatedAFewTimesOnly) {
  FakeTime time;
  int calls = 0;
  const CallResult result = CallWithRetries(
      Plan(absl::Hours(1), CallKind::kStream),
      [&](const Attempt&) {
        ++calls;
        return CallResult{absl::DataLossError("crc"), {}};
      },
      time.Clock());
  EXPECT_TRUE(absl::IsDataLoss(result.status));
  EXPECT_EQ(calls, 1 + kDataLossRepeats);
}

}  // namespace
}  // namespace muond::client
