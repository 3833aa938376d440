#include "client/bench/report.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::bench {
namespace {

using testing::HasSubstr;
using testing::Not;

BenchmarkOptions SomeOptions() {
  return {.model = *models::ParseModel("custom:4x3"), .steps = 3, .endpoint = "unix:///s"};
}

BenchmarkResult SomeResult() {
  BenchmarkResult result;
  result.daemon_version = "0.1.0";
  result.backend = "cpu";
  result.backend_description = "cpu: OpenBLAS";
  result.elements = 12;
  result.muon_matrices = 1;
  result.times = {{.step = 1, .push = 0.002, .finish = 0.5, .pull = 0.004},
                  {.step = 2, .push = 0.001, .finish = 0.5, .pull = 0.004},
                  {.step = 3, .push = 0.004, .finish = 0.5, .pull = 0.004}};
  result.transfer_bytes = 2'000'000;
  result.digest = "abc";
  result.samples = {{.parameter = "w0",
                     .algorithm = "muon",
                     .elements = 12,
                     .error = 1e-5,
                     .tolerance = 0.05,
                     .scale_error = 1e-6,
                     .scale_tolerance = 0.01}};
  result.ceilings = Ceilings{.threads = 2,
                             .memcpy_one_thread = 4e9,
                             .memcpy = 6e9,
                             .sgemm_flops = 2e9,
                             .sgemm_library = "OpenBLAS",
                             .bf16_flops = {},
                             .bf16_library = "none"};
  result.bare_stream = BareStreamRates{.push = 2e9, .pull = 1e9};
  result.memory_need = {.client = 96, .state = 96 << 20, .staging = 48 << 20, .scratch = 1 << 20};
  result.memory_use = {.grown = 150 << 20, .grown_initially = 99 << 20, .state = 96, .staging = 48};
  return result;
}

TEST(Report, ShowsRatesAgainstTheirCeilings) {
  const std::string table = ReportTable(SomeOptions(), SomeResult());
  EXPECT_THAT(table, HasSubstr("push         2.00       1.00       4.00       4.00     1.00"
                               "        25%          50%\n"));
  EXPECT_THAT(table, HasSubstr("step       500.00     500.00     500.00     500.00\n"));
  EXPECT_THAT(table, HasSubstr("memcpy 4.00 GB/s copied by one thread, 6.00 by 2"));
  EXPECT_THAT(table, HasSubstr("none in bf16: none"));
  EXPECT_THAT(
      table,
      HasSubstr(
          "needs 145 MiB: state 96, gradients 48, scratch 1; grew by 150 MiB at most, 99 at"));
  EXPECT_THAT(table, Not(HasSubstr("MORE THAN")));
  EXPECT_THAT(table, HasSubstr("checked: w0 (muon, 12 elements)"));
}

TEST(Report, ShoutsAtWhatIsWrong) {
  BenchmarkResult result = SomeResult();
  result.samples[0].error = 0.06;
  result.memory_use.grown = 200 << 20;
  const std::string table = ReportTable(SomeOptions(), result);
  EXPECT_THAT(table, HasSubstr("WRONG: w0"));
  EXPECT_THAT(table, HasSubstr("MORE THAN 10 % BEYOND THE NEED"));
  const auto json = ReportJson(SomeOptions(), result);
  EXPECT_FALSE(json["check"]["passed"]);
  EXPECT_FALSE(json["memory"]["within_need"]);
}

TEST(Report, NamesUnitsInJson) {
  const auto json = ReportJson(SomeOptions(), SomeResult());
  EXPECT_EQ(json["model"], "custom:4x3");
  EXPECT_EQ(json["target"], "unix:///s");
  EXPECT_EQ(json["newton_schulz_flops"], 5.0 * (4 * 4 * 9 + 2 * 27));
  EXPECT_EQ(json["phases"]["push"]["bytes_per_second"], 1e9);
  EXPECT_EQ(json["phases"]["push"]["p90_seconds"], 0.004);
  EXPECT_EQ(json["phases"]["push"]["seconds"].size(), 3u);
  EXPECT_FALSE(json["phases"]["step"].contains("bytes"));
  const auto& grpc = json["transports"]["grpc"];
  EXPECT_EQ(grpc["push_gbps"], 1);
  EXPECT_EQ(grpc["pull_gbps"], 0.5);
  EXPECT_EQ(grpc["exposed_ms"], 500);
  EXPECT_DOUBLE_EQ(grpc["step_ms"], 506);
  EXPECT_EQ(grpc["digest"], "abc");
  EXPECT_EQ(grpc["share_of_bare_stream"], 0.5);
  EXPECT_EQ(json["ceilings"]["memcpy_gbps"], 6);
  EXPECT_EQ(json["ceilings"]["bf16_gflops"], nullptr);
  EXPECT_EQ(json["shares"]["push_of_memcpy"], 0.25);
  EXPECT_DOUBLE_EQ(json["shares"]["step_of_sgemm"], 990 / 0.5 / 2e9);
  EXPECT_EQ(json["shares"]["step_of_bf16"], nullptr);
  EXPECT_TRUE(json["check"]["passed"]);
  EXPECT_EQ(json["check"]["samples"][0]["parameter"], "w0");
  EXPECT_EQ(json["memory"]["need_state_bytes"], 96 << 20);
  EXPECT_EQ(json["memory"]["grown_initially_bytes"], 99 << 20);
  EXPECT_TRUE(json["memory"]["within_need"]);
}

TEST(Report, WhatWasNotMeasuredIsNull) {
  BenchmarkResult result = SomeResult();
  result.ceilings.reset();
  result.bare_stream.reset();
  result.memory_use.grown = -1;
  result.samples[0].error = std::numeric_limits<double>::quiet_NaN();
  const auto json = ReportJson(SomeOptions(), result);
  for (const auto& [name, value] : json["ceilings"].items()) EXPECT_EQ(value, nullptr) << name;
  for (const auto& [name, value] : json["shares"].items()) EXPECT_EQ(value, nullptr) << name;
  EXPECT_EQ(json["transports"]["grpc"]["share_of_bare_stream"], nullptr);
  EXPECT_EQ(json["memory"]["grown_bytes"], nullptr);
  EXPECT_EQ(json["memory"]["within_need"], nullptr);
  EXPECT_EQ(json["check"]["samples"][0]["error"], nullptr);
  EXPECT_FALSE(json["check"]["passed"]);
  EXPECT_THAT(ReportTable(SomeOptions(), result), Not(HasSubstr("ceilings")));
}

TEST(Report, SaysWhatIsTrainedBeforeTheFirstPacedStep) {
  BenchmarkOptions options = SomeOptions();
  options.model = *models::ParseModel("custom:4x3,5x2:adamw");
  EXPECT_EQ(ReadyJson(options).dump(),
            R"({"steps":3,"tensors":[{"name":"w0","shape":[4,3],"muon":true},)"
            R"({"name":"w1","shape":[5,2],"muon":false}]})");
}

TEST(Report, OneStepIsOneLine) {
  EXPECT_EQ(StepJson({.step = 7, .push = 1, .finish = 2, .pull = 0.5}).dump(),
            R"({"step":7,"push_seconds":1.0,"step_seconds":2.0,"pull_seconds":0.5,)"
            R"("total_seconds":3.5})");
}

}  // namespace
}  // namespace muond::bench
