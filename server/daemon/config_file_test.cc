#include "server/daemon/config_file.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<ConfigEntry> Parse(const std::string& text) {
  auto entries = ParseConfigText(text, "f");
  EXPECT_TRUE(entries.ok()) << entries.status();
  return entries.ok() ? *entries : std::vector<ConfigEntry>();
}

TEST(ConfigFile, ReadsNumbersSwitchesAndStrings) {
  const auto entries =
      Parse("threads = 8\ninsecure=true # yes\n\n  a = \"x # \\\" \\\\ y\"\r\nb = -3");
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].key, "threads");
  EXPECT_THAT(entries[0].values, ElementsAre("8"));
  EXPECT_THAT(entries[1].values, ElementsAre("true"));
  EXPECT_EQ(entries[2].line, 4);
  EXPECT_THAT(entries[2].values, ElementsAre("x # \" \\ y"));
  EXPECT_THAT(entries[3].values, ElementsAre("-3"));
}

TEST(ConfigFile, ReadsArraysOverSeveralLines) {
  const auto entries = Parse("listen = [\n  \"a\", # first\n  \"b\",\n]\nempty = []\n");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_TRUE(entries[0].array);
  EXPECT_THAT(entries[0].values, ElementsAre("a", "b"));
  EXPECT_EQ(entries[1].line, 5);
  EXPECT_THAT(entries[1].values, IsEmpty());
}

TEST(ConfigFile, ReadsNothingFromNothing) {
  EXPECT_THAT(Parse(""), IsEmpty());
  EXPECT_THAT(Parse("# only a comment"), IsEmpty());
}

TEST(ConfigFile, SaysWhereAndWhat) {
  const struct {
    const char* text;
    const char* message;
  } kCases[] = {
      {"\n\n[log]\n", "f:3: tables"},
      {"threads", "f:1: expected `key = value` after \"threads\""},
      {"= 3", "f:1: expected `key = value`"},
      {"a = \"x", "f:1: key \"a\": the string has no closing quote"},
      {"a = \"x\\n\"", "a string knows"},
      {"a = word", "f:1: key \"a\": expected a number, true, false or a quoted string"},
      {"a = 1.5", "expected a number"},
      {"a = ", "expected a number"},
      {"a = 1 2", "unexpected text after the value"},
      {"a = [\"x\" \"y\"]", "expected , or ]"},
      {"\na = [\"x\",\n", "f:2: key \"a\": the array has no end"},
      {"a = 1\nb = 2\na = 3\n", "f:3: key \"a\" was set in line 1 already"},
  };
  for (const auto& test : kCases) {
    const auto entries = ParseConfigText(test.text, "f");
    EXPECT_EQ(entries.status().code(), absl::StatusCode::kInvalidArgument) << test.text;
    EXPECT_THAT(std::string(entries.status().message()), HasSubstr(test.message)) << test.text;
  }
}

}  // namespace
}  // namespace muond
