#include "server/transport/arena_table.h"

#include "gtest/gtest.h"

namespace muond {
namespace {

constexpr ArenaSize kSize{64 * 1024, 1};
constexpr std::int64_t kBytes = 4096 + 2 * 64 * 1024;
const absl::Time kNow = absl::FromUnixSeconds(1000);

TEST(ArenaTable, AnArenaIsUsableOnceItWasFetchedAndOnlyByItsOwner) {
  ArenaTable table({});
  const auto arena = table.Open({"r", 0}, kSize, kNow);
  ASSERT_TRUE(arena.ok());
  const std::string handle = (*arena)->handle();
  EXPECT_EQ(handle.size(), 16u);
  EXPECT_FALSE(table.Find(handle, {"r", 0}).ok());  // nobody has it yet
  ASSERT_TRUE(table.Attach(handle).ok());
  EXPECT_TRUE(table.Find(handle, {"r", 0}).ok());
  EXPECT_EQ(table.Find(handle, {"r", 1}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.Find(handle, {"s", 0}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.Find("", {"r", 0}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ArenaTable, AHandleServesOnce) {
  ArenaTable table({});
  const auto arena = table.Open({"r", 0}, kSize, kNow);
  ASSERT_TRUE(table.Attach((*arena)->handle()).ok());
  EXPECT_EQ(table.Attach((*arena)->handle()).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(table.Attach(std::string(16, '\0')).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST(ArenaTable, AnotherOpenTakesTheFormerOnesPlace) {
  ArenaTable table({.bytes_max = 2 * kBytes, .count_max = 1});
  auto first = table.Open({"r", 0}, kSize, kNow);
  ASSERT_TRUE(table.Attach((*first)->handle()).ok());
  const auto second = table.Open({"r", 0}, kSize, kNow);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE((*first)->revoked());
  EXPECT_EQ(table.attached(), 0);
  // A stream that still uses it counts.
  EXPECT_EQ(table.bytes(), 2 * kBytes);
  EXPECT_EQ(table.Open({"r", 0}, kSize, kNow).status().code(),
            absl::StatusCode::kResourceExhausted);
  first->reset();
  EXPECT_TRUE(table.Open({"r", 0}, kSize, kNow).ok());
}

TEST(ArenaTable, LimitsHold) {
  ArenaTable table({.bytes_max = std::int64_t{1} << 30, .count_max = 2});
  ASSERT_TRUE(table.Open({"r", 0}, kSize, kNow).ok());
  ASSERT_TRUE(table.Open({"r", 1}, kSize, kNow).ok());
  const auto third = table.Open({"r", 2}, kSize, kNow);
  EXPECT_EQ(third.status().message(),
            "run \"r\": arena of rank 2: the daemon has 2 already (--max-arenas)");
  table.Close({"r", 1});
  EXPECT_TRUE(table.Open({"r", 2}, kSize, kNow).ok());
}

TEST(ArenaTable, WhatNobodyComesForIsLetGo) {
  std::int64_t told = -1;
  ArenaTable table({.attach_within = absl::Seconds(10)},
                   [&told](std::int64_t, std::int64_t bytes) { told = bytes; });
  std::string waiting, fetched;
  waiting = (*table.Open({"r", 0}, kSize, kNow))->handle();
  fetched = (*table.Open({"r", 1}, kSize, kNow))->handle();
  ASSERT_TRUE(table.Attach(fetched).ok());
  table.Sweep(kNow + absl::Seconds(9));
  EXPECT_EQ(table.bytes(), 2 * kBytes);
  table.Sweep(kNow + absl::Seconds(10));
  EXPECT_EQ(told, kBytes);
  EXPECT_FALSE(table.Attach(waiting).ok());
  EXPECT_TRUE(table.Find(fetched, {"r", 1}).ok());
}

TEST(ArenaTable, TheEndOfAnOlderConnectionLeavesANewerArenaAlone) {
  ArenaTable table({});
  const auto first = *table.Open({"r", 0}, kSize, kNow);
  ASSERT_TRUE(table.Attach(first->handle()).ok());
  const auto second = *table.Open({"r", 0}, kSize, kNow);
  ASSERT_TRUE(table.Attach(second->handle()).ok());
  table.Detach(first);
  EXPECT_TRUE(table.Find(second->handle(), {"r", 0}).ok());
  table.CloseHandle(first->handle(), {"r", 0});
  EXPECT_TRUE(table.Find(second->handle(), {"r", 0}).ok());
  table.CloseHandle(second->handle(), {"r", 0});
  EXPECT_EQ(table.attached(), 0);
}

}  // namespace
}  // namespace muond
