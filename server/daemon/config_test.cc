#include "server/daemon/config.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/config_settings.h"

namespace muond {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class ConfigTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(testing::TempDir()) / absl::StrFormat("config-%d", getpid());
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // A config file with this text; its path.
  std::string File(const std::string& text) {
    std::string path = (directory_ / "muond.conf").string();
    std::ofstream(path) << text;
    return path;
  }
  static Config Parse(const std::vector<std::string>& arguments, const Environment& env = {}) {
    auto result = ParseCommandLine(arguments, env);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->config : Config();
  }
  static std::string ErrorOf(const std::vector<std::string>& arguments,
                             const Environment& env = {}) {
    auto result = ParseCommandLine(arguments, env);
    EXPECT_FALSE(result.ok());
    return std::string(result.status().message());
  }

  std::filesystem::path directory_;
};

TEST_F(ConfigTest, HasTheDocumentedDefaults) {
  const Config config = Parse({});
  EXPECT_THAT(config.service.listen, ElementsAre("unix:///run/muond/muond.sock", "127.0.0.1:7070"));
  EXPECT_EQ(config.service.metrics_address, "127.0.0.1:9470");
  EXPECT_EQ(config.service.backend, "auto");
  EXPECT_FALSE(config.insecure);
  EXPECT_THAT(config.warnings, IsEmpty());
}

constexpr struct {
  const char* name;
  const char* weak;    // for the file
  const char* middle;  // for the variable
  const char* strong;  // for the flag
} kValues[] = {
    {"listen", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"},
    {"socket-users", "a", "b", "@c"},
    {"metrics-address", "127.0.0.1:11", "127.0.0.1:12", "127.0.0.1:13"},
    {"insecure", "true", "false", "true"},
    {"tls-cert", "a", "b", "c"},
    {"tls-key", "a", "b", "c"},
    {"tls-ca", "a", "b", "c"},
    {"tls-server-name", "a", "b", "c"},
    {"tls-refresh", "1s", "2s", "3s"},
    {"health-address", "127.0.0.1:11", "127.0.0.1:12", "127.0.0.1:13"},
    {"reflection", "true", "false", "true"},
    {"backend", "reference", "auto", "cpu"},
    {"devices", "0", "1", "GPU-1"},
    {"cpu-products", "f32", "bf16", "f32"},
    {"threads", "1", "2", "3"},
    {"peers", "a:1,b:1", "dns:///c:1", "@/d"},
    {"advertise", "a:1", "b:1", "c:1"},
    {"peers-expected", "1", "2", "3"},
    {"peer-patience", "1s", "2s", "3s"},
    {"state-dir", "/a", "/b", "/c"},
    {"overlap", "true", "false", "true"},
    {"checkpoint-dir", "/a", "/b", "/c"},
    {"checkpoint-every-steps", "1", "2", "3"},
    {"checkpoint-every", "1s", "2s", "3s"},
    {"checkpoint-keep", "1", "2", "4"},
    {"buddy-steps", "1", "2", "3"},
    {"restore", "none", "1", "2"},
    {"step-deadline", "1s", "2s", "3s"},
    {"drain-grace", "1s", "2s", "3s"},
    {"max-chunk-bytes", "1MiB", "2MiB", "3MiB"},
    {"max-arena-bytes", "1MiB", "2MiB", "3MiB"},
    {"max-arenas", "1", "2", "3"},
    {"nccl", "off", "auto", "off"},
    {"nccl-library", "/a/libnccl.so.2", "/b/libnccl.so.2", "/c/libnccl.so.2"},
    {"nccl-deadline", "1s", "2s", "3s"},
    {"max-tensor-bytes", "1GiB", "3GiB", "4GiB"},
    {"max-run-bytes", "1GiB", "3GiB", "4GiB"},
    {"max-parameters", "1", "2", "3"},
    {"max-runs", "1", "2", "3"},
    {"max-world-size", "1", "2", "3"},
    {"diagnostics-every", "0", "1", "2"},
    {"log-every", "1", "2", "3"},
    {"log-level", "debug", "warning", "error"},
    {"log-format", "json", "text", "json"},
    {"fault-points", "a", "b", "c"},
};

// Every setting by every source: two values each, and the stronger source must win.
TEST_F(ConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  EXPECT_EQ(std::size(kValues), AllSettings().size()) << "a setting is missing in this table";
  for (const auto& test : kValues) {
    SCOPED_TRACE(test.name);
    const Setting* setting = FindSetting(test.name);
    ASSERT_NE(setting, nullptr);
    const bool bare =
        setting->kind == SettingKind::kInteger || setting->kind == SettingKind::kSwitch;
    const std::string quote = bare ? "" : "\"";
    const std::string path =
        File(absl::StrFormat("%s = %s%s%s\n", test.name, quote, test.weak, quote));
    const std::string flag = absl::StrFormat("--%s=%s", test.name, test.strong);
    const Environment env = {{setting->Variable(), test.middle}};

    // The three files of TLS are accepted together only.
    std::vector<std::string> arguments = {"--config", path};
    const std::set<std::string> files = {"tls-cert", "tls-key", "tls-ca"};
    for (const std::string& other : files) {
      if (files.contains(test.name) && other != test.name) arguments.push_back("--" + other + "=x");
    }
    const Config file_only = Parse(arguments);
    EXPECT_EQ(setting->get(file_only)[0], test.weak);
    EXPECT_EQ(file_only.sources.at(test.name), path + ":1");
    const Config with_env = Parse(arguments, env);
    EXPECT_EQ(setting->get(with_env)[0], test.middle);
    EXPECT_EQ(with_env.sources.at(test.name), "environment " + setting->Variable());
    arguments.push_back(flag);
    const Config with_flag = Parse(arguments, env);
    EXPECT_EQ(setting->get(with_flag)[0], test.strong);
    EXPECT_EQ(with_flag.sources.at(test.name), absl::StrFormat("flag --%s", test.name));
  }
}

TEST_F(ConfigTest, TakesTheFilesNameFromFlagOrEnvironment) {
  const std::string path = File("threads = 7\n");
  EXPECT_EQ(Parse({}, {{"MUOND_CONFIG", path}}).service.threads, 7);
  EXPECT_EQ(Parse({"--config", path}, {{"MUOND_CONFIG", "/nonexistent"}}).service.threads, 7);
  EXPECT_EQ(Parse({"--config", path}).file, path);
  EXPECT_EQ(ParseCommandLine({"--config", "/nonexistent"}, {}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ConfigTest, ListsMayBeRepeatedOrSeparatedByCommas) {
  EXPECT_THAT(Parse({"--listen", "127.0.0.1:1,127.0.0.1:2"}).service.listen,
              ElementsAre("127.0.0.1:1", "127.0.0.1:2"));
  EXPECT_THAT(Parse({"--listen", "127.0.0.1:1", "--listen", "127.0.0.1:2"}).service.listen,
              ElementsAre("127.0.0.1:1", "127.0.0.1:2"));
  EXPECT_THAT(Parse({}, {{"MUOND_LISTEN", "127.0.0.1:1,127.0.0.1:2"}}).service.listen,
              ElementsAre("127.0.0.1:1", "127.0.0.1:2"));
}

TEST_F(ConfigTest, AnUnknownKeyInTheFileIsAnErrorWithTheNearestName) {
  EXPECT_THAT(ErrorOf({"--config", File("# x\nlisen = [\"127.0.0.1:0\"]\n")}),
              HasSubstr("muond.conf:2: unknown key \"lisen\" (did you mean \"listen\"?)"));
  EXPECT_THAT(ErrorOf({"--config", File("entirely-else = 1\n")}), Not(HasSubstr("did you mean")));
  EXPECT_THAT(ErrorOf({"--config", File("threads = [\"1\"]\n")}), HasSubstr("not an array"));
}

TEST_F(ConfigTest, AnUnknownVariableIsAWarningUnlessItIsTheClients) {
  const Config config = Parse({}, {{"MUOND_THREAD", "3"},
                                   {"MUOND_ENDPOINT", "x"},
                                   {"MUOND_ENDPOINTS", "x"},
                                   {"MUOND_THREADS", ""}});
  EXPECT_THAT(config.warnings, ElementsAre(HasSubstr("MUOND_THREAD ")));
  EXPECT_EQ(config.service.threads, 0) << "an empty variable counts as unset";
}

TEST_F(ConfigTest, RefusesWhatMakesNoSenseAndSaysWhereItCameFrom) {
  const struct {
    std::vector<std::string> arguments;
    const char* message;
  } kCases[] = {
      {{"--nonsense"}, "--nonsense"},
      {{"positional"}, "positional"},
      {{"--threads", "x"}, "threads (flag --threads): expected a whole number, got \"x\""},
      {{"--threads", "-1"}, "threads \"-1\" (flag --threads): expected 0 to 4096"},
      {{"--threads", "1", "--threads", "2"}, "threads"},
      {{"--step-deadline", "2"}, "expected a duration"},
      {{"--step-deadline", "inf"}, "expected a duration"},
      {{"--step-deadline", "0s"}, "expected more than 0"},
      {{"--drain-grace=-1s"}, "expected a duration"},
      {{"--max-chunk-bytes", "4MB"}, "expected bytes"},
      {{"--max-chunk-bytes", "9999999999GiB"}, "expected bytes"},
      {{"--max-chunk-bytes", "1"}, "expected 4096 to"},
      {{"--max-runs", "0"}, "expected 1 to"},
      {{"--insecure=maybe"}, "insecure"},
      {{"--backend", "gpu"}, "expected one of auto, cuda, cpu, reference"},
      {{"--log-level", "loud"}, "expected one of debug, info, warning, error"},
      {{"--log-format", "xml"}, "expected one of text, json"},
      {{"--listen", "127.0.0.1"}, "expected unix:///path, host:port or [IPv6]:port"},
      {{"--listen", "127.0.0.1:70000"}, "the port 0 to 65535"},
      {{"--listen", "127.0.0.1:"}, "the port 0 to 65535"},
      {{"--listen", "::1:7070"}, "[IPv6]:port"},
      {{"--listen", "unix://relative.sock"}, "unix:///absolute/path"},
      {{"--listen", "unix:///dir/"}, "unix:///absolute/path"},
      {{"--listen", "unix:///" + std::string(200, 'x')}, "at most 107 bytes"},
      {{"--listen", "127.0.0.1:1,127.0.0.1:1"}, "there twice"},
      {{"--listen", "127.0.0.1:9470"}, "taken by another setting"},
      {{"--metrics-address", "9470"}, "metrics-address \"9470\""},
      {{"--health-address", "7071"}, "health-address \"7071\""},
      {{"--health-address", "127.0.0.1:7070"}, "taken by another setting"},
      {{"--health-address", "127.0.0.1:9470"}, "taken by another setting"},
      {{"--tls-ca", "a"}, "belong together"},
      {{"--tls-refresh", "0s"}, "a second or more"},
  };
  for (const auto& test : kCases) {
    EXPECT_THAT(ErrorOf(test.arguments), HasSubstr(test.message)) << test.arguments[0];
  }
  EXPECT_THAT(ErrorOf({}, {{"MUOND_LISTEN", "127.0.0.1:1,"}}),
              HasSubstr("listen (environment MUOND_LISTEN): expected no empty entry"));
}

TEST_F(ConfigTest, TlsTakesThePlaceOfInsecure) {
  std::vector<std::string> arguments = {"--tls-cert=a", "--tls-key=b", "--tls-ca=c", "--listen",
                                        "0.0.0.0:7070"};
  EXPECT_THAT(Parse(arguments).warnings, IsEmpty());
  arguments.push_back("--insecure");
  EXPECT_THAT(ErrorOf(arguments), HasSubstr("asks for certificates"));
}

TEST_F(ConfigTest, PlainTcpBeyondLoopbackNeedsInsecure) {
  for (const char* address : {"0.0.0.0:7070", "[::]:7070", "10.0.0.1:7070", "node1:7070",
                              "127.example.org:7070"}) {
    EXPECT_THAT(ErrorOf({"--listen", address}), HasSubstr("--insecure")) << address;
    EXPECT_THAT(Parse({"--listen", address, "--insecure"}).warnings,
                ElementsAre(HasSubstr(address)));
  }
  for (const char* address : {"127.0.0.1:0", "127.1.2.3:7070", "[::1]:7070", "localhost:7070",
                              "unix:///tmp/muond.sock"}) {
    EXPECT_THAT(Parse({"--listen", address}).warnings, IsEmpty()) << address;
  }
  EXPECT_THAT(Parse({"--metrics-address", "0.0.0.0:9470"}).warnings,
              ElementsAre(HasSubstr("0.0.0.0:9470")));
}

TEST_F(ConfigTest, MetricsCanBeTurnedOff) {
  const Config config = Parse({"--metrics-address", "none"});
  EXPECT_EQ(config.service.metrics_address, "");
  EXPECT_THAT(PrintConfig(config), HasSubstr("metrics-address = \"none\"  # flag"));
}

TEST_F(ConfigTest, PrintedConfigTellsSourcesAndReadsBackTheSame) {
  const std::string path = File("threads = 3\nmax-chunk-bytes = 1000000\n");
  const std::vector<std::string> arguments = {"--config", path, "--listen",
                                              "127.0.0.1:1,unix:///tmp/a \"b\".sock",
                                              "--insecure", "--print-config"};
  const auto line = ParseCommandLine(arguments, {{"MUOND_STEP_DEADLINE", "90s"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->text, HasSubstr("threads = 3  # " + path + ":1\n"));
  EXPECT_THAT(line->text, HasSubstr("step-deadline = \"1m30s\"  # environment "
                                    "MUOND_STEP_DEADLINE\n"));
  EXPECT_THAT(line->text, HasSubstr("insecure = true  # flag --insecure\n"));
  EXPECT_THAT(line->text, HasSubstr("max-runs = 16  # default\n"));

  const Config again = Parse({"--config", File(line->text)});
  for (const Setting& setting : AllSettings()) {
    EXPECT_EQ(setting.get(again), setting.get(line->config)) << setting.name;
  }
}

TEST_F(ConfigTest, TheExampleFileShowsEverySettingAtItsDefault) {
  const Config example = Parse({"--config", "deploy/muond.conf"});
  for (const Setting& setting : AllSettings()) {
    EXPECT_EQ(setting.get(example), setting.get(Config())) << setting.name;
    if (setting.name == "fault-points") continue;
    EXPECT_TRUE(example.sources.contains(std::string(setting.name)))
        << setting.name << " is missing in deploy/muond.conf";
  }
}

TEST_F(ConfigTest, HelpNamesEveryFlagAndVariable) {
  const auto line = ParseCommandLine({"--help"}, {});
  ASSERT_TRUE(line.ok());
  for (const Setting& setting : AllSettings()) {
    EXPECT_THAT(line->text, HasSubstr(setting.Flag()));
    EXPECT_THAT(line->text, HasSubstr(setting.Variable()));
  }
  EXPECT_THAT(line->text, HasSubstr("default 127.0.0.1:9470"));
}

TEST_F(ConfigTest, VersionIsOneLine) {
  const auto line = ParseCommandLine({"--version"}, {});
  ASSERT_TRUE(line.ok());
  EXPECT_THAT(line->text, testing::MatchesRegex("muond [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST_F(ConfigTest, MakesThePrivateDirectoryOfASocket) {
  const std::filesystem::path sockets = directory_ / "run";
  Config config;
  config.service.listen = {"unix://" + (sockets / "muond.sock").string(), "127.0.0.1:0"};
  ASSERT_TRUE(PrepareSocketDirectories(config).ok());
  struct stat info {};
  ASSERT_EQ(stat(sockets.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  EXPECT_TRUE(PrepareSocketDirectories(config).ok()) << "it may be there already";
}

TEST_F(ConfigTest, NamesTheFlagWhenASocketCannotBeMade) {
  Config config;
  config.service.listen = {"unix://" + (directory_ / "a/b/muond.sock").string()};
  const absl::Status status = PrepareSocketDirectories(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("No such file"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--listen 127.0.0.1:7070"));
}

}  // namespace
}  // namespace muond
