// muonctl plan, which asks no daemon: the endpoint of these tests is none.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/cli/message_json.h"
#include "client/cli/muonctl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

struct Result {
  int code;
  std::string out;
  std::string err;
};

Result Plan(std::vector<std::string> arguments) {
  std::ostringstream out, err;
  arguments.insert(arguments.begin(), {"--endpoint", "unix:///nonexistent/muond.sock", "plan"});
  const int code = RunMuonctl(arguments, {.environment = {}, .out = out, .err = err});
  return {code, out.str(), err.str()};
}

Json PlanAsJson(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"-o", "json"});
  const Result result = Plan(arguments);
  EXPECT_EQ(result.code, 0) << result.err;
  return Json::parse(result.out);
}

TEST(MuonctlPlan, LlamasAreWithinFivePercentOfTheFloor) {
  for (const char* model : {"llama1b", "llama7b", "llama70b"}) {
    for (const char* daemons : {"1", "2", "4", "8", "16", "32", "64"}) {
      const Json plan = PlanAsJson({"--model", model, "--daemons", daemons});
      EXPECT_LE(plan["imbalance_over_floor"], 1.05) << model << " on " << daemons;
      EXPECT_EQ(plan["daemons"].size(), std::stoul(daemons));
    }
  }
}

TEST(MuonctlPlan, JsonAddsUp) {
  const Json plan =
      PlanAsJson({"--model", "llama1b", "--daemons", "3", "--devices", "2", "--dtype", "bf16"});
  EXPECT_EQ(plan["model"], "llama1b");
  EXPECT_EQ(plan["matrices"], 112);
  EXPECT_EQ(plan["owners"], 6);
  std::int64_t matrices = 0, elements = 0, in = 0;
  for (const Json& daemon : plan["daemons"]) {
    std::int64_t memory = 0;
    ASSERT_EQ(daemon["devices"].size(), 2u);
    for (const Json& device : daemon["devices"]) memory += device["memory_bytes"].get<int64_t>();
    EXPECT_EQ(daemon["memory_bytes"], memory);
    matrices += daemon["matrices"].get<std::int64_t>();
    elements += daemon["elements"].get<std::int64_t>();
    in += daemon["bytes_in"].get<std::int64_t>();
  }
  EXPECT_EQ(matrices, 112);
  EXPECT_EQ(elements, 1'235'814'400);
  EXPECT_EQ(in, 2 * elements);
}

TEST(MuonctlPlan, TableSaysLoadMemoryAndAdvice) {
  const Result result = Plan({"--model", "llama1b", "--daemons", "64"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.err, IsEmpty());
  for (const char* text : {"DAEMON", "NS TFLOP", "SCRATCH", "IN/STEP",
                           "largest load 0.7731 TFLOP: "
                           "1.0000 of the floor",
                           "splitting matrices would help: 48 matrices of "
                           "8192 x 2048, 0.7731 TFLOP each, for 64 owners; "}) {
    EXPECT_THAT(result.out, HasSubstr(text));
  }
  EXPECT_THAT(Plan({"--model", "llama1b", "--daemons", "16"}).out,
              HasSubstr("splitting matrices would not help: "));
  EXPECT_THAT(Plan({"--model", "llama1b", "--devices", "2"}).out, HasSubstr("DEVICE"));
}

TEST(MuonctlPlan, ScratchGrowsWithOverlapAndDependsOnTheBackend) {
  const auto scratch = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--model", "llama1b"});
    return PlanAsJson(more)["daemons"][0]["scratch_bytes"].get<std::int64_t>();
  };
  EXPECT_NE(scratch({}), scratch({"--backend", "cuda"}));
  EXPECT_GT(scratch({"--overlap"}), scratch({}));
  EXPECT_GT(scratch({"--overlap", "--backend", "cuda"}), scratch({"--backend", "cuda"}));
}

TEST(MuonctlPlan, MemoryLimitIsKeptOrRefused) {
  const Json plan = PlanAsJson({"--model", "llama1b", "--daemons", "4", "--memory-max", "5GiB"});
  for (const Json& daemon : plan["daemons"]) {
    EXPECT_LE(daemon["memory_bytes"], std::int64_t{5} << 30);
  }
  const Result refused = Plan({"--model", "llama1b", "--memory-max", "5GiB"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("muonctl: plan: parameter \"layers."));
  EXPECT_THAT(refused.err, HasSubstr("the memory limit is 5368709120 bytes"));
}

TEST(MuonctlPlan, AMomentumInBf16TakesTwoBytesLessAnElement) {
  const auto state = [](const std::vector<std::string>& flags) {
    return PlanAsJson(flags)["daemons"][0]["state_bytes"].get<std::int64_t>();
  };
  const std::string model = "custom:100x100x3,50x50:adamw";
  EXPECT_EQ(state({"--model", model}), 30'000 * 8 + 2'500 * 12);
  EXPECT_EQ(state({"--model", model, "--momentum-dtype", "bf16"}), 30'000 * 6 + 2'500 * 12);
  EXPECT_NE(Plan({"--model", model, "--momentum-dtype", "f16"}).code, 0);
  const std::string path = testing::TempDir() + "/plan_momentum.json";
  std::ofstream(path) << R"({"groups": [{"name": "all", "momentum_dtype": "bf16"}],
                            "parameters": [{"name": "w", "shape": [10, 10]}]})";
  EXPECT_EQ(state({"--model", path}), 600);
  EXPECT_EQ(state({"--model", path, "--momentum-dtype", "f32"}), 800);
  std::filesystem::remove(path);
}

TEST(MuonctlPlan, ReadsModelFiles) {
  const std::string path = testing::TempDir() + "/plan_model.json";
  std::ofstream(path) << R"([{"name": "experts", "shape": [8, 512, 256], "kind": "experts"}])";
  const Json plan = PlanAsJson({"--model", path, "--daemons", "4"});
  EXPECT_EQ(plan["shards"], 4);
  EXPECT_EQ(plan["daemons"][3]["matrices"], 2);
  std::ofstream(path) << R"([{"name": "w", "shape": [8, 512, 256]}])";
  const Result refused = Plan({"--model", path});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("parameter \"w\": shape [8, 512, 256] without a kind"));
  std::ofstream(path) << R"([{"name": "w", "form": [8]}])";
  EXPECT_THAT(Plan({"--model", path}).err, HasSubstr("parameters[0] \"w\": key \"form\""));
  std::filesystem::remove(path);
}

TEST(MuonctlPlan, TellsHowLongAStepTakesOnAMachine) {
  const std::vector<std::string> model = {"--model", "llama1b", "--dtype", "bf16", "--backend",
                                          "cuda"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), model.begin(), model.end());
    return more;
  };
  EXPECT_FALSE(PlanAsJson(with({})).contains("step_time"));
  const Json one = PlanAsJson(with({"--machine", "h200"}))["step_time"];
  const Json eight = PlanAsJson(with({"--machine", "h200", "--daemons", "8"}))["step_time"];
  EXPECT_EQ(one["efficiency"], 1);
  EXPECT_LT(eight["step_ms"], one["step_ms"].get<double>() / 4);
  EXPECT_NEAR(eight["efficiency"],
              one["step_ms"].get<double>() / (8 * eight["step_ms"].get<double>()), 1e-9);
  const Json slow = PlanAsJson(with({"--machine", "h200", "--link-gbps", "1"}))["step_time"];
  EXPECT_NEAR(slow["link_ms"], 4 * 1235.8144, 1e-6);
  EXPECT_THAT(Plan(with({"--machine", "h200"})).out, HasSubstr("step on h200, links of 4200 GB/s"));
  EXPECT_EQ(Plan(with({"--link-gbps", "1"})).code, 2) << "of no machine";

  const std::string path = testing::TempDir() + "/machine.json";
  const auto file = [&](const char* text) {
    std::ofstream(path) << text;
    return Plan(with({"--machine", path}));
  };
  EXPECT_THAT(file(R"({"name": "mine", "newton_schulz_tflops": 1, "memory_gbps": 1, "link_gbps": 1,
                       "step_ms": 0, "peer_ms": 0})")
                  .out,
              HasSubstr("step on mine, "));
  EXPECT_THAT(file("[]").err, HasSubstr("machine.json\": expected a JSON object"));
  EXPECT_THAT(file(R"({"name": "mine"})").err, HasSubstr("key \"link_gbps\" is missing"));
  EXPECT_THAT(file(R"({"memory_gb": 1})").err, HasSubstr("key \"memory_gb\": expected numbers"));
  EXPECT_THAT(file(R"({"newton_schulz_tflops": 0, "memory_gbps": 1, "link_gbps": 1,
                       "step_ms": 0, "peer_ms": 0})")
                  .err,
              HasSubstr("newton_schulz_tflops: expected more than 0, got 0"));
  std::filesystem::remove(path);
  EXPECT_THAT(Plan(with({"--machine", "h2000"})).err,
              HasSubstr("expected one of h200, or a machine file that exists"));
}

TEST(MuonctlPlan, RefusesWhatItDoesNotUnderstand) {
  const Result unknown = Plan({"--model", "lama1b"});
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("model \"lama1b\": expected tiny, gpt2"));
  EXPECT_THAT(unknown.err, HasSubstr("or a model file that exists"));
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"--model", "tiny", "--daemons", "0"},
                                             {"--model", "tiny", "--daemons", "x"},
                                             {"--model", "tiny", "--devices", "-1"},
                                             {"--model", "tiny", "--memory-max", "lots"},
                                             {"--model", "tiny", "--dtype", "fp8"},
                                             {"--model", "tiny", "--backend", "tpu"}}) {
    EXPECT_EQ(Plan(arguments).code, 2) << testing::PrintToString(arguments);
  }
  EXPECT_EQ(Plan({"--model", "tiny", "--daemons", "60000", "--devices", "2"}).code, 1);
}

}  // namespace
}  // namespace muond::cli
