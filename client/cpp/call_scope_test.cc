#include "client/cpp/call_scope.h"

#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/connection.h"
#include "client/cpp/retry.h"
#include "gtest/gtest.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);

// Seconds that `wait` takes when `end` is called from another thread meanwhile.
template <typename Wait, typename End>
double SecondsUntil(Wait wait, End end) {
  const absl::Time start = SteadyNow();
  std::thread other([&] {
    absl::SleepFor(absl::Milliseconds(50));
    end();
  });
  wait();
  other.join();
  return absl::ToDoubleSeconds(SteadyNow() - start);
}

TEST(CallScope, WhatIsInsideEndsWithItAndWhatComesLaterIsOverAtOnce) {
  CallScope outer(nullptr);
  CallScope inner(&outer), sibling(&outer);
  inner.GiveUp();
  EXPECT_TRUE(inner.over());
  EXPECT_FALSE(outer.over());
  EXPECT_FALSE(sibling.over());
  outer.GiveUp();
  EXPECT_TRUE(sibling.over());
  const CallScope late(&outer);
  EXPECT_TRUE(late.over());
  EXPECT_FALSE(late.cancelled());
}

TEST(CallScope, CancellingEndsWhatIsUnderWayAndNothingThatFollows) {
  CallScope session(nullptr);
  {
    const Operation operation(session);
    CallScope fan(CallScope::Current());
    fan.GiveUp();
    session.CancelInner();
    EXPECT_TRUE(CallScope::Current()->cancelled());
    EXPECT_TRUE(fan.cancelled());
    const Operation nested(session);
    EXPECT_TRUE(CallScope::Current()->cancelled()) << "part of the same method";
  }
  EXPECT_EQ(CallScope::Current(), nullptr);
  const Operation next(session);
  EXPECT_FALSE(CallScope::Current()->over());
}

TEST(CallScope, ASleepEndsEarly) {
  CallScope scope(nullptr);
  const CallScope::Guard guard(&scope);
  EXPECT_LT(SecondsUntil([] { CallScope::Sleep(kLong); }, [&] { scope.GiveUp(); }), 10);
}

TEST(CallScope, APauseThatConnectsEndsEarly) {
  auto connection = Connection::Open("unix:///no/such/daemon", nullptr, 1 << 20);
  ASSERT_TRUE(connection.ok()) << connection.status();
  CallScope scope(nullptr);
  const CallScope::Guard guard(&scope);
  EXPECT_LT(SecondsUntil([&] { (*connection)->Pause(kLong); }, [&] { scope.GiveUp(); }), 10);
}

TEST(CallScope, RetriesSayThatTheyWereCancelled) {
  CallScope session(nullptr);
  const Operation operation(session);
  int calls = 0;
  const CallResult result = CallWithRetries(
      {.what = "run \"r\": pull of version 3", .peer = "p", .timeout = kLong},
      [&](const Attempt&) -> CallResult {
        if (++calls == 2) session.CancelInner();
        return {absl::UnavailableError("away"), std::nullopt};
      });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(result.status, absl::CancelledError("run \"r\": pull of version 3: cancelled"));
}

}  // namespace
}  // namespace muond::client
