#include <cmath>
#include <set>
#include <string>

#include "client/bench/benchmark_run.h"
#include "client/bench/memory_need.h"
#include "client/bench/model.h"
#include "client/bench/report.h"
#include "client/bench/statistics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::bench {
namespace {

using testing::HasSubstr;

Model Parsed(const std::string& name) {
  auto model = ParseModel(name);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *model : Model();
}

std::int64_t HiddenMatrices(const Model& model) {
  std::int64_t count = 0;
  for (const ModelTensor& tensor : model.tensors) {
    if (tensor.role == Role::kHidden) ++count;
  }
  return count;
}

TEST(Model, HasTheShapesOfTheRealOnes) {
  EXPECT_EQ(HiddenMatrices(Parsed("gpt2")), 48);
  EXPECT_EQ(Parsed("gpt2").Elements(), 12 * 768 * 768 * 12 + (50304 + 1024) * 768);
  EXPECT_EQ(HiddenMatrices(Parsed("llama1b")), 112);
  EXPECT_NEAR(static_cast<double>(Parsed("llama1b").Elements() - 128256LL * 2048), 0.973e9, 1e6);
  EXPECT_EQ(HiddenMatrices(Parsed("7b8")), 56);
  EXPECT_NEAR(static_cast<double>(Parsed("7b8").Elements() - 32000LL * 4096), 1.619e9, 1e6);
  EXPECT_LT(Parsed("tiny").Elements(), 150'000);
}

TEST(Model, NamesEachTensorOnce) {
  for (const char* name : {"tiny", "gpt2", "llama1b", "7b8", "custom:4x3x7,2x2"}) {
    const Model model = Parsed(name);
    std::set<std::string> names;
    for (const ModelTensor& tensor : model.tensors) EXPECT_TRUE(names.insert(tensor.name).second);
  }
}

TEST(Model, CustomListsMatrices) {
  const Model model = Parsed("custom:4x3x2,5x6");
  ASSERT_EQ(model.tensors.size(), 3u);
  EXPECT_EQ(model.tensors[1].shape, (Dims{4, 3}));
  EXPECT_EQ(model.tensors[2].shape, (Dims{5, 6}));
  EXPECT_EQ(model.Elements(), 12 + 12 + 30);
}

TEST(Model, RefusesWhatIsNone) {
  for (const char* name :
       {"", "gpt3", "custom:", "custom:4", "custom:4x", "custom:4x3,", "custom:0x3", "custom:-1x3",
        "custom:4x3x2x1", "custom:4x3x999999999", "custom:axb", "custom:4000000000x4000000000",
        "custom:99999999999999999999x1"}) {
    EXPECT_EQ(ParseModel(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(Model, BecomesARunOfOneRank) {
  const RunSpec spec = MakeRunSpec(Parsed("tiny"), "r", Dtype::kBF16);
  EXPECT_EQ(spec.name, "r");
  EXPECT_EQ(spec.world_size, 1);
  ASSERT_EQ(spec.parameters.size(), 10u);
  EXPECT_EQ(spec.parameters[2].dtype, Dtype::kBF16);
  EXPECT_EQ(spec.parameters[2].role, Role::kHidden);
}

TEST(Statistics, MedianAndExtremes) {
  EXPECT_EQ(Summarize({3}).median, 3);
  EXPECT_EQ(Summarize({9, 1, 2}).median, 2);
  const Summary even = Summarize({4, 1, 9, 2});
  EXPECT_EQ(even.median, 3);
  EXPECT_EQ(even.min, 1);
  EXPECT_EQ(even.max, 9);
}

TEST(MemoryNeed, CountsTheDaemonOnlyWhereItIs) {
  const Model model = Parsed("custom:1000x1000");
  const MemoryNeed remote = EstimateMemory(model, Dtype::kBF16, false);
  EXPECT_EQ(remote.client_bytes, 4'000'000);
  EXPECT_EQ(remote.daemon_bytes, 0);
  const MemoryNeed local = EstimateMemory(model, Dtype::kBF16, true);
  EXPECT_EQ(local.client_bytes, 4'000'000);
  EXPECT_EQ(local.daemon_bytes, 14'000'000 + 24'000'000);
  EXPECT_TRUE(IsLocalEndpoint("unix:///run/muond/muond.sock"));
  EXPECT_TRUE(IsLocalEndpoint("127.0.0.1:7070"));
  EXPECT_TRUE(IsLocalEndpoint("[::1]:7070"));
  EXPECT_FALSE(IsLocalEndpoint("10.0.0.1:7070"));
  EXPECT_GT(AvailableMemory(), 0);
}

TEST(MemoryNeed, RefusesWhatDoesNotFitWithNumbers) {
  const Model model = Parsed("7b8");
  const MemoryNeed need = EstimateMemory(model, Dtype::kF32, true);
  const absl::Status status = CheckMemory(model, need, std::int64_t{8} << 30);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model \"7b8\""));
  EXPECT_THAT(std::string(status.message()), HasSubstr("8.0 GiB are available"));
  EXPECT_TRUE(CheckMemory(model, need, std::int64_t{1} << 40).ok());
  EXPECT_TRUE(CheckMemory(model, need, -1).ok()) << "unknown is no refusal";
}

BenchmarkResult SomeResult() {
  return {.daemon_version = "0.1.0",
          .backend = "cpu",
          .backend_description = "cpu: OpenBLAS",
          .elements = 12,
          .muon_matrices = 1,
          .fallbacks = 0,
          .phases = {{.name = "push", .bytes = 2'000'000, .seconds = {0.002, 0.001, 0.004}},
                     {.name = "step", .bytes = 0, .seconds = {0.5}}},
          .memcpy_bytes_per_second = 4e9};
}

TEST(Report, ShowsRatesAgainstMemcpy) {
  const BenchmarkOptions options{.model = Parsed("custom:4x3")};
  const std::string table = ReportTable(options, SomeResult());
  EXPECT_THAT(table, HasSubstr("push         2.00       1.00       4.00     1.00        25%\n"));
  EXPECT_THAT(table, HasSubstr("step       500.00     500.00     500.00\n"));
}

TEST(Report, WritesBaseUnitsAsJson) {
  const BenchmarkOptions options{.model = Parsed("custom:4x3")};
  const auto json = ReportJson(options, SomeResult());
  EXPECT_EQ(json["model"], "custom:4x3");
  EXPECT_EQ(json["phases"]["push"]["bytes_per_second"], 1e9);
  EXPECT_EQ(json["phases"]["push"]["seconds"].size(), 3u);
  EXPECT_FALSE(json["phases"]["step"].contains("bytes"));
}

TEST(Memcpy, IsPlausible) {
  const double rate = MeasureMemcpy();
  EXPECT_GT(rate, 1e8);
  EXPECT_LT(rate, 1e12);
}

}  // namespace
}  // namespace muond::bench
