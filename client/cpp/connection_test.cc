#include "client/cpp/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace muond::client {
namespace {

using ::testing::HasSubstr;

std::string Target(const std::string& endpoint) {
  const auto target = ResolveTarget(endpoint);
  return target.ok() ? *target : std::string(target.status().message());
}

TEST(ResolveTarget, TakesUnixPathsWithOneOrThreeSlashes) {
  EXPECT_EQ(Target("unix:///run/muond/muond.sock"), "unix:/run/muond/muond.sock");
  EXPECT_EQ(Target("unix:/run/muond/muond.sock"), "unix:/run/muond/muond.sock");
  EXPECT_EQ(Target("unix:muond.sock"), "unix:muond.sock");
}

TEST(ResolveTarget, TakesHostsWithAPort) {
  EXPECT_EQ(Target("127.0.0.1:7070"), "127.0.0.1:7070");
  EXPECT_EQ(Target("[::1]:7070"), "[::1]:7070");
}

TEST(ResolveTarget, QuotesWhatItRefusesAndShowsWhatIsMeant) {
  EXPECT_THAT(Target("/run/m.sock"), HasSubstr("\"/run/m.sock\": a path needs \"unix://\""));
  EXPECT_THAT(Target("unix://run/muond.sock"), HasSubstr("three slashes"));
  EXPECT_THAT(Target("unix:"), HasSubstr("path of the unix socket is missing"));
  EXPECT_THAT(Target("unix:/" + std::string(107, 'x')), HasSubstr("at most 107 bytes"));
  EXPECT_THAT(Target("http://host:1"), HasSubstr("unknown scheme"));
  EXPECT_THAT(Target("localhost"), HasSubstr("expected \"unix:///path\" or \"host:port\""));
  EXPECT_THAT(Target("localhost:"), HasSubstr("missing"));
  EXPECT_THAT(Target("localhost:0"), HasSubstr("1..65535"));
  EXPECT_THAT(Target("localhost:70700"), HasSubstr("1..65535"));
  EXPECT_THAT(Target("localhost:http"), HasSubstr("1..65535"));
}

TEST(ResolveTarget, EmptyMeansTheEnvironment) {
  ::setenv("MUOND_ENDPOINT", "unix:///run/a.sock", 1);
  EXPECT_EQ(Target(""), "unix:/run/a.sock");
  ::unsetenv("MUOND_ENDPOINT");
  EXPECT_THAT(Target(""), HasSubstr("MUOND_ENDPOINT is not set"));
}

}  // namespace
}  // namespace muond::client
