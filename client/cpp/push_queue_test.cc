#include "client/cpp/push_queue.h"

#include <atomic>
#include <cstddef>
#include <optional>
#include <span>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/call_scope.h"
#include "gtest/gtest.h"

namespace muond::client {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);
const SliceSource kSlice[] = {{.parameter = "w", .elements = 1}};

TEST(PushQueue, WhatIsQueuedGoesTogether) {
  CallScope calls(nullptr);
  std::atomic<int> begun = 0;
  std::atomic<std::size_t> last = 0;
  std::atomic<bool> go = false;
  PushQueue queue(calls, [&](std::span<const SliceSource> sources) -> CallResult {
    last = sources.size();
    ++begun;
    while (!go) absl::SleepFor(absl::Milliseconds(1));
    return {};
  });
  queue.Add(kSlice);
  while (begun == 0) absl::SleepFor(absl::Milliseconds(1));
  const auto second = queue.Add(kSlice), third = queue.Add(kSlice);
  EXPECT_FALSE(second->done());
  go = true;
  EXPECT_TRUE(queue.Drain().status.ok());
  EXPECT_TRUE(second->done());
  EXPECT_TRUE(third->Wait(kLong).ok());
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(last, 2U);
}

// Else the end of the push that is cancelled would let the next one begin, which nobody cancels any
// more: whoever waits for it waits until its timeout.
TEST(PushQueue, CancelEndsWhatIsQueuedBeforeWhatIsUnderWay) {
  CallScope calls(nullptr);
  for (int i = 0; i < 50; ++i) {
    std::atomic<int> begun = 0;
    std::atomic<bool> both = false;
    std::atomic<PushTicket*> queued = nullptr;
    PushQueue queue(calls, [&](std::span<const SliceSource>) -> CallResult {
      if (++begun > 1) return {};
      while (!CallScope::CurrentIsOver()) std::this_thread::yield();
      both = queued.load()->done();
      return {absl::CancelledError("the push under way"), std::nullopt};
    });
    const auto first = queue.Add(kSlice);
    while (begun == 0) std::this_thread::yield();
    const auto second = queue.Add(kSlice);
    queued = second.get();
    queue.Cancel();
    EXPECT_TRUE(absl::IsCancelled(first->Wait(kLong)));
    EXPECT_TRUE(absl::IsCancelled(second->Wait(kLong)));
    ASSERT_TRUE(both);
    ASSERT_EQ(begun, 1);
    EXPECT_TRUE(absl::IsCancelled(queue.Drain().status));
  }
}

}  // namespace
}  // namespace muond::client
