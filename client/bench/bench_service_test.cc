// The benchmark against the real service, in one process.
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "client/bench/benchmark_run.h"
#include "client/cpp/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/embedded.h"

namespace muond::bench {
namespace {

using testing::HasSubstr;

class BenchService : public testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    auto service = Service::Start({.threads = 1});
    ASSERT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
  }

  BenchmarkOptions Options(const std::string& model, Dtype dtype = Dtype::kF32) {
    auto parsed = models::ParseModel(model);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return {.model = *parsed,
            .dtype = dtype,
            .steps = 3,
            .run = "bench",
            .channel = service_->channel(),
            .threads = 1,
            .ceilings = false};
  }

  int RunsLeft() {
    client::Admin admin(service_->channel(), absl::Seconds(5));
    const auto status = admin.Status();
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() ? status->runs_size() : -1;
  }

  std::unique_ptr<Service> service_;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, BenchService,
                         testing::Values(Dtype::kF32, Dtype::kBF16, Dtype::kF16),
                         [](const auto& info) {
                           return std::string(kernels::DtypeName(info.param));
                         });

TEST_P(BenchService, TrainsATinyModelAndLeavesNothingBehind) {
  const auto result = RunBenchmark(Options("tiny", GetParam()));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->muon_matrices, 8);
  EXPECT_EQ(result->fallbacks, 0);
  ASSERT_EQ(result->times.size(), 3u);
  for (const StepTimes& times : result->times) {
    EXPECT_GT(times.push, 0);
    EXPECT_GT(times.finish, 0);
    EXPECT_GT(times.pull, 0);
  }
  EXPECT_EQ(result->samples.size(), 3u) << "square, rectangular, AdamW";
  for (const SampleError& sample : result->samples) {
    EXPECT_TRUE(sample.passed()) << sample.parameter << " " << sample.error << " "
                                 << sample.scale_error;
  }
  EXPECT_EQ(result->digest.size(), 32u);
  EXPECT_EQ(RunsLeft(), 0);
}

using BenchServiceOnce = BenchService;
INSTANTIATE_TEST_SUITE_P(Dtypes, BenchServiceOnce, testing::Values(Dtype::kF32));

TEST_P(BenchServiceOnce, MayRunTwiceUnderOneName) {
  const auto first = RunBenchmark(Options("custom:4x3x2,3x4"));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(RunBenchmark(Options("custom:5x5")).ok());
  EXPECT_EQ(RunBenchmark(Options("custom:4x3x2,3x4"))->digest, first->digest);
}

TEST_P(BenchServiceOnce, SeesAWrongLearningRate) {
  BenchmarkOptions options = Options("tiny");
  options.reference_lr_factor = 1.02;
  const auto result = RunBenchmark(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->SamplesPassed());
  for (const SampleError& sample : result->samples) EXPECT_FALSE(sample.passed());
}

TEST_P(BenchServiceOnce, TakesSyntheticParameters) {
  const auto result = RunBenchmark(Options("synthetic:101x4"));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->muon_matrices, 51);
  EXPECT_TRUE(result->SamplesPassed());
}

// The request for all slices is many times a chunk.
TEST_P(BenchServiceOnce, PullsThousandsOfSmallParametersThroughASocket) {
  const std::string address = absl::StrFormat("unix:/tmp/muond-bench-%d.sock", getpid());
  const auto service = Service::Start({.threads = 1, .listen = {address}});
  ASSERT_TRUE(service.ok()) << service.status();
  BenchmarkOptions options = Options("synthetic:10000x2");
  options.channel = nullptr;
  options.endpoint = address;
  options.chunk_bytes = 4096;
  options.steps = options.warmup = 1;
  const auto result = RunBenchmark(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->SamplesPassed());
}

TEST_P(BenchServiceOnce, ClosesItsRunWhenInterrupted) {
  std::atomic<bool> stop{false};
  BenchmarkOptions options = Options("tiny");
  options.stop = &stop;
  options.after_step = [&stop](const StepTimes&) { stop = true; };
  const auto result = RunBenchmark(options);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("after 1 of 3 measured steps"));
  EXPECT_EQ(RunsLeft(), 0);
}

TEST_P(BenchServiceOnce, MeasuresCeilingsOnRequest) {
  BenchmarkOptions options = Options("tiny");
  options.ceilings = true;
  const auto result = RunBenchmark(options);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_TRUE(result->ceilings.has_value());
  EXPECT_GT(result->ceilings->memcpy, 1e8);
  EXPECT_FALSE(result->bare_stream.has_value()) << "an in-process channel hands pointers over";
}

// 8 M elements of Muon and 16 M of AdamW: state 256 MiB, gradients 96, scratch 146.
TEST_P(BenchServiceOnce, HoldsStateOneCopyOfTheGradientsAndScratch) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory and a shadow of all of it";
#endif
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer keeps a shadow of all memory";
#endif
  BenchmarkOptions options = Options("custom:1024x8192,16384x1024:adamw");
  options.steps = options.warmup = 1;
  const auto result = RunBenchmark(options);
  ASSERT_TRUE(result.ok()) << result.status();
  const MemoryNeed& need = result->memory_need;
  const MemoryUse& use = result->memory_use;
  EXPECT_EQ(use.state, need.state);
  EXPECT_EQ(use.staging, need.staging) << "one copy of the gradients, as they arrived";
  EXPECT_TRUE(MemoryWithinNeed(need, use)) << use.grown << " bytes, needed " << need.Daemon();
  EXPECT_GT(use.grown, need.state + need.staging) << "what it holds was seen";
}

}  // namespace
}  // namespace muond::bench
