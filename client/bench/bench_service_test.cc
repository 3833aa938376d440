// The benchmark against the real service, in one process.
#include <memory>
#include <string>

#include "client/bench/benchmark_run.h"
#include "client/cpp/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/embedded.h"

namespace muond::bench {
namespace {

class BenchService : public testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    auto service = Service::Start({.threads = 1});
    ASSERT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
  }

  BenchmarkOptions Options(const std::string& model) {
    auto parsed = ParseModel(model);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return {.model = *parsed,
            .dtype = GetParam(),
            .steps = 3,
            .run = "bench",
            .channel = service_->channel()};
  }

  std::unique_ptr<Service> service_;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, BenchService,
                         testing::Values(Dtype::kF32, Dtype::kBF16, Dtype::kF16),
                         [](const auto& info) {
                           return std::string(kernels::DtypeName(info.param));
                         });

TEST_P(BenchService, TrainsATinyModelAndLeavesNothingBehind) {
  const auto result = RunBenchmark(Options("tiny"));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->muon_matrices, 8);
  EXPECT_EQ(result->fallbacks, 0);
  ASSERT_EQ(result->phases.size(), 4u);
  for (const Phase& phase : result->phases) {
    ASSERT_EQ(phase.seconds.size(), 3u) << phase.name;
    for (const double seconds : phase.seconds) EXPECT_GT(seconds, 0);
  }
  client::Admin admin(service_->channel(), absl::Seconds(5));
  const auto status = admin.Status();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->runs_size(), 0);
}

TEST_P(BenchService, MayRunTwiceUnderOneName) {
  EXPECT_TRUE(RunBenchmark(Options("custom:4x3x2,3x4")).ok());
  EXPECT_TRUE(RunBenchmark(Options("custom:5x5")).ok());
}

}  // namespace
}  // namespace muond::bench
