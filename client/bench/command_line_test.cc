#include "client/bench/command_line.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::bench {
namespace {

using testing::HasSubstr;

absl::StatusOr<CommandLine> Parse(std::vector<const char*> arguments,
                                  const std::string& endpoint = "") {
  arguments.insert(arguments.begin(), "muond-bench");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data(), endpoint);
}

TEST(CommandLine, HasDefaults) {
  const auto line = Parse({});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.model.name, "tiny");
  EXPECT_EQ(line->options.endpoint, "127.0.0.1:7070");
  EXPECT_THAT(line->options.run, HasSubstr("bench-"));
  EXPECT_TRUE(line->options.ceilings);
  EXPECT_FALSE(line->in_process);
  EXPECT_EQ(line->options.reference_lr_factor, 1);
}

TEST(CommandLine, TakesTheEndpointFromFlagOrEnvironment) {
  EXPECT_EQ(Parse({}, "unix:///a")->options.endpoint, "unix:///a");
  EXPECT_EQ(Parse({"--endpoint", "unix:///b"}, "unix:///a")->options.endpoint, "unix:///b");
  EXPECT_EQ(Parse({"--target", "unix:///b"})->options.endpoint, "unix:///b");
}

TEST(CommandLine, InProcessTakesABackend) {
  const auto line =
      Parse({"--in-process", "--backend", "reference", "--threads", "3"}, "unix:///a");
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_TRUE(line->in_process);
  EXPECT_EQ(line->backend, "reference");
  EXPECT_EQ(line->options.threads, 3);
  EXPECT_EQ(line->options.endpoint, "");
}

TEST(CommandLine, SetsTheWork) {
  const auto line = Parse({"--model", "custom:4x3", "--dtype", "bf16", "--steps", "7", "--warmup",
                           "5", "--chunk-bytes", "4096", "--run", "r", "--seed", "9",
                           "--no-ceilings", "--json", "-", "--paced", "--check-memory"});
  ASSERT_TRUE(line.ok()) << line.status();
  const BenchmarkOptions& options = line->options;
  EXPECT_EQ(options.model.Elements(), 12);
  EXPECT_EQ(options.dtype, Dtype::kBF16);
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.warmup, 5);
  EXPECT_EQ(options.chunk_bytes, 4096);
  EXPECT_EQ(options.run, "r");
  EXPECT_EQ(options.seed, 9u);
  EXPECT_FALSE(options.ceilings);
  EXPECT_EQ(line->json, "-");
  EXPECT_TRUE(line->paced);
  EXPECT_TRUE(line->memory_must_fit);
}

TEST(CommandLine, RefusesByName) {
  const struct {
    std::vector<const char*> arguments;
    const char* named;
  } cases[] = {
      {{"--transport", "carrier-pigeon"}, "carrier-pigeon"},
      {{"--model", "gpt3"}, "gpt3"},
      {{"--dtype", "f64"}, "f64"},
      {{"--steps", "0"}, "--steps"},
      {{"--chunk-bytes", "1"}, "--chunk-bytes"},
      {{"--backend", "cpu"}, "--in-process"},
      {{"--in-process", "--endpoint", "unix:///a"}, "--endpoint"},
      {{"--no-such-flag"}, "--no-such-flag"},
  };
  for (const auto& bad : cases) {
    const auto line = Parse(bad.arguments);
    EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument) << bad.named;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr(bad.named));
  }
}

TEST(CommandLine, HelpAndVersionAreTexts) {
  EXPECT_THAT(Parse({"--help"})->text, HasSubstr("--model"));
  EXPECT_THAT(Parse({"--version"})->text, HasSubstr("muond-bench "));
  EXPECT_EQ(Parse({"--help"})->text.find("--reference-lr-factor"), std::string::npos);
}

}  // namespace
}  // namespace muond::bench
