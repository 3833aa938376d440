#include "server/transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace muond {
namespace {

constexpr std::int64_t kWindow = 64 * 1024;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::shared_ptr<Arena> MakeArena() {
  auto layout = LayOutArena({kWindow, 2}, 1 << 20);
  EXPECT_TRUE(layout.ok()) << layout.status();
  auto arena = Arena::Create({"r", 3}, *layout, nullptr);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *arena;
}

TEST(ArenaLayout, WindowsAndSlotsDontOverlap) {
  const auto layout = LayOutArena({kWindow, 3}, 1 << 20);
  ASSERT_TRUE(layout.ok());
  ASSERT_EQ(layout->windows.size(), 6u);
  std::string used(static_cast<std::size_t>(layout->bytes), '.');
  const auto use = [&used](std::int64_t offset, std::int64_t bytes) {
    for (std::int64_t i = offset; i < offset + bytes; ++i) {
      ASSERT_EQ(used.at(static_cast<std::size_t>(i)), '.');
      used[static_cast<std::size_t>(i)] = 'x';
    }
  };
  for (std::size_t i = 0; i < layout->windows.size(); ++i) {
    const ArenaWindow& window = layout->windows[i];
    EXPECT_EQ(window.to_daemon, i < 3);
    EXPECT_EQ(window.offset % kArenaPageBytes, 0);
    EXPECT_EQ(window.bytes, kWindow);
    use(window.offset, window.bytes);
    use(window.filled, 8);
    use(window.drained, 8);
  }
}

TEST(ArenaLayout, SizesThatATrainerMayNotHaveAreRefused) {
  const ArenaSize bad[] = {{kWindow, 0}, {kWindow, -1}, {kWindow, kArenaWindowsMax + 1},
                           {kWindow, kMax}, {0, 2}, {-4096, 2}, {kWindow + 1, 2}, {4096, 2}};
  for (const ArenaSize& size : bad) {
    EXPECT_EQ(LayOutArena(size, kMax).status().code(), absl::StatusCode::kInvalidArgument)
        << size.window_bytes << " x " << size.windows;
  }
  const ArenaSize huge[] = {{kMax / 4096 * 4096, 2}, {kMax / 4096 * 4096, 16}, {1 << 20, 2}};
  for (const ArenaSize& size : huge) {
    EXPECT_EQ(LayOutArena(size, 1 << 20).status().code(), absl::StatusCode::kResourceExhausted)
        << size.window_bytes << " x " << size.windows;
  }
  EXPECT_EQ(LayOutArena({kWindow, 1}, -5).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(Arena, RegionsOutsideOfTheirWindowAreRefusedAlsoWhereSumsOverflow) {
  const auto arena = MakeArena();
  const ArenaWindow window = arena->layout().windows[1];
  EXPECT_TRUE(arena->Region(1, window.offset, kWindow).ok());
  EXPECT_TRUE(arena->Region(1, window.offset + kWindow, 0).ok());
  const std::pair<std::int64_t, std::int64_t> bad[] = {
      {window.offset - 1, 2},           // into the window before
      {window.offset + 1, kWindow},     // beyond the end
      {window.offset, kWindow + 1},     {window.offset, -1}, {-1, 1},
      {0, 8},                           // a slot
      {kMax, 1},                        {kMax, kMax}, {window.offset, kMax},
      {std::numeric_limits<std::int64_t>::min(), 1}, {kMax - 7, 16}};
  for (const auto& [offset, bytes] : bad) {
    EXPECT_EQ(arena->Region(1, offset, bytes).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bytes << " bytes at " << offset;
  }
}

TEST(Arena, WindowsThatAreNoneOrGoTheOtherWayAreRefused) {
  const auto arena = MakeArena();
  for (const std::int64_t window : {std::int64_t{-1}, std::int64_t{2}, std::int64_t{4}, kMax}) {
    EXPECT_EQ(arena->CheckFilled(window, 1).code(), absl::StatusCode::kInvalidArgument) << window;
    EXPECT_EQ(arena->Region(window, 0, 8).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Arena, AFenceThatDoesNotStandThereIsNotWaitedFor) {
  const auto arena = MakeArena();
  EXPECT_EQ(arena->CheckFilled(0, 1).message(),
            "run \"r\": arena of rank 3: window 0: announced as filled for the 1-th time, its "
            "fence says 0");
  EXPECT_EQ(arena->CheckFilled(0, 0).code(), absl::StatusCode::kFailedPrecondition);
  auto trainer = ArenaMemory::Map(Descriptor(dup(arena->descriptor())), arena->layout().bytes);
  ASSERT_TRUE(trainer.ok());
  trainer->Set(arena->layout().windows[0].filled, 7);
  EXPECT_TRUE(arena->CheckFilled(0, 7).ok());
  EXPECT_EQ(arena->CheckFilled(0, 6).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Arena, WhatTheTrainerWroteComesOutAndTheFenceNeverGoesBack) {
  const auto arena = MakeArena();
  auto trainer = ArenaMemory::Map(Descriptor(dup(arena->descriptor())), arena->layout().bytes);
  ASSERT_TRUE(trainer.ok());
  const ArenaWindow window = arena->layout().windows[0];
  std::memcpy(trainer->data() + window.offset + 64, "gradient", 8);
  const auto region = arena->Region(0, window.offset + 64, 8);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(*region, "gradient");
  arena->SetDrained(0, 5);
  arena->SetDrained(0, 4);  // of an older stream
  EXPECT_EQ(trainer->Get(window.drained), 5u);
  trainer->Set(window.drained, 99);  // the trainer's own doing
  arena->SetDrained(0, 6);
  EXPECT_EQ(trainer->Get(window.drained), 6u);
}

// A trainer can take pages away (they read as zeros then), but not the size.
TEST(Arena, HolesThatATrainerPunchesAreZerosAndNoSignal) {
  const auto arena = MakeArena();
  const int fd = arena->descriptor();
  EXPECT_EQ(ftruncate(fd, 0), -1);
  ASSERT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, arena->layout().bytes), 0);
  const auto region = arena->Region(0, arena->layout().windows[0].offset, kWindow);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(*region, std::string(kWindow, '\0'));
}

TEST(Arena, ARevokedOneTakesNothingMore) {
  const auto arena = MakeArena();
  arena->Revoke();
  EXPECT_EQ(arena->CheckFilled(0, 1).message(),
            "run \"r\": arena of rank 3: it was let go of: open another");
  EXPECT_EQ(arena->Region(0, arena->layout().windows[0].offset, 8).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Arena, OnePullAtATime) {
  const auto arena = MakeArena();
  ASSERT_TRUE(arena->BeginPull().ok());
  EXPECT_EQ(arena->BeginPull().code(), absl::StatusCode::kUnavailable);
  arena->EndPull();
  EXPECT_TRUE(arena->BeginPull().ok());
}

}  // namespace
}  // namespace muond
