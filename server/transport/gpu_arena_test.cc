// Arenas of a GPU: how they are laid out, and what is no place in them.
#include "proto/steady_time.h"
#include "server/transport/gpu_arena.h"

#include <cstring>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/arena_table.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

class GpuArenaTest : public ::testing::Test {
 protected:
  std::unique_ptr<kernels::DeviceMemory> gpu_ = kernels::MakeHostDeviceMemory("GPU-a");
  ArenaTable table_{{.attach_within = absl::Seconds(5)}};
  const ArenaOwner owner_{"r", 0};
  const ArenaSize size_{.window_bytes = 1024, .windows = 2, .gpu = gpu_.get(), .pull_bytes = 512};
  std::shared_ptr<Arena> arena_ = *table_.Open(owner_, size_, SteadyNow());
};

TEST_F(GpuArenaTest, WindowsLieSideBySideInOneBlockAndTheHandleBesideTheFences) {
  const ArenaLayout& layout = arena_->layout();
  ASSERT_EQ(layout.windows.size(), 3u);
  EXPECT_EQ(layout.windows[1].offset, 1024);
  EXPECT_FALSE(layout.windows[2].to_daemon);
  EXPECT_EQ(layout.windows[2].bytes, 512);
  EXPECT_EQ(layout.gpu_bytes, 2 << 20);
  EXPECT_EQ(layout.bytes, 4096);
  EXPECT_EQ(arena_->gpu()->handle().size(), 64u);
  EXPECT_EQ(kernels::OpenHostBlock(arena_->gpu()->handle()), arena_->gpu()->data());
  EXPECT_EQ(table_.gpu_bytes(), 2 << 20);
}

TEST_F(GpuArenaTest, NoRegionReachesBeyondItsWindowWhateverItsNumbers) {
  EXPECT_TRUE(arena_->GpuRegion(0, 0, 1024, true).ok());
  EXPECT_EQ(*arena_->GpuRegion(1, 1024 + 8, 16, true), arena_->gpu()->data() + 1032);
  const std::int64_t bad[][2] = {{0, 1025},    {1, 1024},    {-1, 8},      {1024, 1},  {8, -1},
                                 {kMax, 1},    {1, kMax},    {kMax, kMax}, {-kMax, kMax},
                                 {1016, kMax - 1000}};
  for (const auto& [offset, bytes] : bad) {
    EXPECT_EQ(arena_->GpuRegion(0, offset, bytes, true).status().code(),
              absl::StatusCode::kInvalidArgument)
        << offset << " " << bytes;
  }
  EXPECT_FALSE(arena_->GpuRegion(2, 2048, 8, true).ok());   // towards the trainer
  EXPECT_FALSE(arena_->GpuRegion(0, 0, 8, false).ok());     // towards the daemon
  EXPECT_FALSE(arena_->GpuRegion(3, 0, 8, true).ok());
  EXPECT_FALSE(arena_->GpuRegion(-1, 0, 8, true).ok());
  arena_->Revoke();
  EXPECT_EQ(arena_->GpuRegion(0, 0, 8, true).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(GpuArenaTest, HostAndGpuArenasAreNotMistakenForEachOther) {
  EXPECT_THAT(std::string(arena_->Region(0, 0, 1).status().message()), HasSubstr("a GPU's"));
  const auto host =
      table_.Open({"r", 1}, {.window_bytes = 64 * 1024, .windows = 1}, SteadyNow());
  ASSERT_TRUE(host.ok());
  EXPECT_THAT(std::string((*host)->GpuRegion(0, 4096, 8, true).status().message()),
              HasSubstr("host memory"));
}

TEST_F(GpuArenaTest, TheBlockIsFreedWithItsLastUser) {
  const std::string handle = arena_->gpu()->handle();
  table_.Close(owner_);
  EXPECT_NE(kernels::OpenHostBlock(handle), nullptr);  // a stream still uses it
  arena_.reset();
  EXPECT_EQ(kernels::OpenHostBlock(handle), nullptr);
  EXPECT_EQ(table_.gpu_bytes(), 0);
}

TEST_F(GpuArenaTest, SizesThatMakeNoSenseAreRefused) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-256}, std::int64_t{100}, kMax,
                                   kGpuWindowBytesMax + 256}) {
    ArenaSize size = size_;
    size.window_bytes = bytes;
    EXPECT_EQ(LayOutGpuArena(size).status().code(), absl::StatusCode::kInvalidArgument) << bytes;
    size = size_;
    size.pull_bytes = bytes;
    EXPECT_EQ(LayOutGpuArena(size).status().code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
}

// ---- Moves --------------------------------------------------------------------------------------

TEST(MoveSum, IsTheSameInAnyCutAndDiffersWithAnyElement) {
  std::vector<std::uint32_t> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint32_t>(i * i);
  const std::uint64_t whole = kernels::SumOf(values.data(), values.size(), 4, 0);
  std::uint64_t parts = 0;
  for (std::size_t at = 0; at < values.size();) {
    const std::size_t n = std::min<std::size_t>(1 + at % 37, values.size() - at);
    parts += kernels::SumOf(values.data() + at, n, 4, at);
    at += n;
  }
  EXPECT_EQ(parts, whole);
  for (std::size_t i = 0; i < values.size(); i += 41) {
    values[i] ^= 1;
    EXPECT_NE(kernels::SumOf(values.data(), values.size(), 4, 0), whole) << i;
    values[i] ^= 1;
  }
  std::swap(values[3], values[700]);
  EXPECT_NE(kernels::SumOf(values.data(), values.size(), 4, 0), whole);
}

}  // namespace
}  // namespace muond
