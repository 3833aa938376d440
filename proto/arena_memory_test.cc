#include "proto/arena_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "gtest/gtest.h"

namespace muond {
namespace {

constexpr std::int64_t kBytes = 64 * 1024;

ArenaMemory MakeMemory() {
  auto memory = ArenaMemory::Create(kBytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

TEST(ArenaMemory, NobodyCanShrinkOrGrowIt) {
  const ArenaMemory memory = MakeMemory();
  EXPECT_EQ(ftruncate(memory.descriptor(), kBytes / 2), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(memory.descriptor(), kBytes * 2), -1);
  // Nor take the seals off again, there is no call for that; nor add others.
  EXPECT_EQ(fcntl(memory.descriptor(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  std::memset(memory.data(), 1, kBytes);
}

TEST(ArenaMemory, BothMappingsShowTheSameBytes) {
  const ArenaMemory mine = MakeMemory();
  auto other = ArenaMemory::Map(Descriptor(dup(mine.descriptor())), kBytes);
  ASSERT_TRUE(other.ok()) << other.status();
  mine.data()[kBytes - 1] = std::byte{42};
  EXPECT_EQ(other->data()[kBytes - 1], std::byte{42});
}

TEST(ArenaMemory, MemoryOfAnotherSizeOrWithoutSealsIsNotMapped) {
  const ArenaMemory mine = MakeMemory();
  EXPECT_EQ(ArenaMemory::Map(Descriptor(dup(mine.descriptor())), kBytes * 2).status().code(),
            absl::StatusCode::kInvalidArgument);
  Descriptor plain(memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(plain.get(), kBytes), 0);
  EXPECT_EQ(ArenaMemory::Map(std::move(plain), kBytes).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ArenaMemory, MemoryThatCantBeMadeIsAnErrorThatNamesItsSize) {
  const auto memory = ArenaMemory::Create(-4096);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(memory.status().message().find("-4096 bytes"), absl::string_view::npos);
}

TEST(ArenaMemory, AWaiterSeesTheSlotAndWhatWasWrittenBeforeIt) {
  const ArenaMemory memory = MakeMemory();
  constexpr std::int64_t kSlot = 128;
  std::thread setter([&memory] {
    std::memset(memory.data() + 4096, 7, 4096);
    memory.Set(kSlot, (std::uint64_t{5} << 32) + 1);
  });
  while (memory.Get(kSlot) == 0) memory.WaitWhile(kSlot, 0, absl::Seconds(10));
  EXPECT_EQ(memory.Get(kSlot), (std::uint64_t{5} << 32) + 1);
  EXPECT_EQ(memory.data()[8191], std::byte{7});
  setter.join();
}

TEST(ArenaMemory, AWaitEndsWithItsTime) {
  const ArenaMemory memory = MakeMemory();
  memory.WaitWhile(0, 0, absl::Milliseconds(1));
  EXPECT_EQ(memory.Get(0), 0u);
}

TEST(ArenaMemory, AConnectionTellsThatTheOtherSideIsGone) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  Descriptor mine(pair[0]);
  {
    Descriptor theirs(pair[1]);
    EXPECT_FALSE(ArenaHungUp(mine.get()));
  }
  EXPECT_TRUE(ArenaHungUp(mine.get()));
}

TEST(ArenaMemory, ASocketThatIsNotThereIsNamed) {
  const auto arena = ReceiveArena("/nonexistent/muond.sock.arena", std::string(16, 'x'),
                                  absl::Seconds(1));
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(arena.status().message().find("/nonexistent/muond.sock.arena"), std::string::npos);
}

}  // namespace
}  // namespace muond
