// Statistics, values, memory and ceilings.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <vector>

#include "client/bench/ceilings.h"
#include "client/bench/memory_need.h"
#include "client/bench/process_memory.h"
#include "client/bench/statistics.h"
#include "client/bench/values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::bench {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

models::Model Parsed(const std::string& name) {
  auto model = models::ParseModel(name);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *model : models::Model();
}

TEST(Statistics, MedianAndSpread) {
  EXPECT_EQ(Summarize({3}).median, 3);
  EXPECT_EQ(Summarize({3}).p90, 3);
  EXPECT_EQ(Summarize({9, 1, 2}).median, 2);
  const Summary even = Summarize({4, 1, 9, 2});
  EXPECT_EQ(even.median, 3);
  EXPECT_EQ(even.min, 1);
  EXPECT_EQ(even.max, 9);
  EXPECT_EQ(Summarize({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}).p90, 9);
  EXPECT_EQ(Summarize({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}).p90, 10);
}

TEST(Random, IsNearlyNormalAndNeverZero) {
  Random random(7);
  double sum = 0, squares = 0;
  constexpr int kDraws = 200'000;
  for (int i = 0; i < kDraws; ++i) {
    const float value = random.Normal();
    ASSERT_NE(value, 0.0f);
    ASSERT_LT(std::abs(value), 3.5f);
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kDraws, 0, 0.02);
  EXPECT_NEAR(squares / kDraws, 1, 0.02);
}

TEST(Values, RoundTripsEveryDtype) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    Values values(3, dtype);
    values.Poison();
    EXPECT_FALSE(values.AllFinite());
    for (std::size_t i = 0; i < 3; ++i) values.Set(i, 0.25f * static_cast<float>(i + 1));
    EXPECT_TRUE(values.AllFinite());
    EXPECT_EQ(values.At(2), 0.75f);
    EXPECT_EQ(values.data(2) - values.data(), static_cast<std::ptrdiff_t>(2 * DtypeBytes(dtype)));
    const std::uint32_t digest = values.Digest();
    values.Fill(1, 1);
    EXPECT_NE(values.Digest(), digest);
  }
}

TEST(MemoryNeed, CountsTheDaemonOnlyWhereItIs) {
  const models::Model model = Parsed("custom:1000x1000,1000x1000:adamw");
  const MemoryNeed remote = EstimateMemory(model, Dtype::kBF16, false, 2);
  EXPECT_EQ(remote.client, 8'000'000);
  EXPECT_EQ(remote.Daemon(), 0);
  const MemoryNeed local = EstimateMemory(model, Dtype::kBF16, true, 2);
  EXPECT_EQ(local.client, 8'000'000);
  EXPECT_EQ(local.state, 8'000'000 + 12'000'000);
  EXPECT_EQ(EstimateMemory(model, Dtype::kBF16, true, 2, Dtype::kBF16).state,
            6'000'000 + 12'000'000);
  EXPECT_EQ(local.staging, 4'000'000);
  EXPECT_EQ(local.scratch, 8'000'000 + 2 * 26'000'000) << "U, O; products for each thread";
  EXPECT_TRUE(IsLocalEndpoint("unix:///run/muond/muond.sock"));
  EXPECT_TRUE(IsLocalEndpoint("127.0.0.1:7070"));
  EXPECT_TRUE(IsLocalEndpoint("[::1]:7070"));
  EXPECT_FALSE(IsLocalEndpoint("10.0.0.1:7070"));
  EXPECT_GT(AvailableMemory(), 0);
}

TEST(MemoryNeed, RefusesWhatDoesNotFitWithNumbers) {
  const models::Model model = Parsed("7b8");
  const MemoryNeed need = EstimateMemory(model, Dtype::kF32, true, 2);
  const absl::Status status = CheckMemory(model, need, std::int64_t{8} << 30);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model \"7b8\""));
  EXPECT_THAT(std::string(status.message()), HasSubstr("8.0 GiB are available"));
  EXPECT_TRUE(CheckMemory(model, need, std::int64_t{1} << 40).ok());
  EXPECT_TRUE(CheckMemory(model, need, -1).ok()) << "unknown is no refusal";
}

TEST(MemoryUse, MayExceedTheNeedByATenth) {
  const MemoryNeed need{.state = 700 * kMiB, .staging = 200 * kMiB, .scratch = 100 * kMiB};
  EXPECT_TRUE(MemoryWithinNeed(need, {.grown = 1100 * kMiB}));
  EXPECT_TRUE(MemoryWithinNeed(need, {.grown = 1100 * kMiB + kMemoryFixed}));
  EXPECT_FALSE(MemoryWithinNeed(need, {.grown = 1101 * kMiB + kMemoryFixed}));
  EXPECT_TRUE(MemoryWithinNeed(need, {})) << "not known";
}

TEST(ProcessMemory, SeesWhatWasTouchedAndForgetsItOnRequest) {
  const std::int64_t pid = getpid();
  ASSERT_TRUE(ResetPeak(pid));
  const std::int64_t before = PeakResidentBytes(pid);
  // From the kernel itself: an allocator may keep what is freed, as AddressSanitizer's does.
  constexpr std::size_t kBytes = 64 * kMiB;
  void* pages = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(munmap(pages, kBytes), 0);
  EXPECT_GE(PeakResidentBytes(pid), before + 60 * kMiB);
  ASSERT_TRUE(ResetPeak(pid));
  EXPECT_LT(PeakResidentBytes(pid), before + 32 * kMiB);
  EXPECT_GT(ResidentBytes(pid), 0);
  EXPECT_EQ(ResidentBytes(-1), -1);
  EXPECT_FALSE(ResetPeak(-1));
}

TEST(Ceilings, ArePlausible) {
  const Ceilings ceilings = MeasureCeilings(2);
  EXPECT_EQ(ceilings.threads, 2);
  for (const double rate : {ceilings.memcpy_one_thread, ceilings.memcpy}) {
    EXPECT_GT(rate, 1e8);
    EXPECT_LT(rate, 1e13);
  }
  EXPECT_GT(ceilings.sgemm_flops, 1e8);
  EXPECT_LT(ceilings.sgemm_flops, 1e15);
  EXPECT_NE(ceilings.sgemm_library, "");
  EXPECT_GT(ceilings.bf16_flops.value_or(1e9), 1e8);
  EXPECT_NE(ceilings.bf16_library, "");
}

}  // namespace
}  // namespace muond::bench
