#include "proto/long_turns.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "gtest/gtest.h"

namespace muond {
namespace {

// The turn of this thread; 0 where the kernel does not tell.
std::uint64_t TurnNs() {
  std::uint32_t attributes[14] = {};
  if (syscall(SYS_sched_getattr, 0, attributes, sizeof(attributes), 0u) != 0) return 0;
  std::uint64_t runtime = 0;
  std::memcpy(&runtime, &attributes[6], sizeof(runtime));
  return runtime;
}

TEST(LongTurns, AreLongWhileTheyAreWantedAndNoLonger) {
  const std::uint64_t before = TurnNs();
  if (before == 0) GTEST_SKIP() << "this kernel has no turns of one's own choice";
  {
    const LongTurns turns;
    EXPECT_GE(TurnNs(), std::uint64_t{10'000'000});
    {
      const LongTurns nested;
      EXPECT_GE(TurnNs(), std::uint64_t{10'000'000});
    }
    EXPECT_GE(TurnNs(), std::uint64_t{10'000'000});
  }
  EXPECT_EQ(TurnNs(), before);
}

}  // namespace
}  // namespace muond
