#include "proto/version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace muond {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusCode Code(std::string_view own, std::string_view other) {
  return CheckVersions(own, other, "client \"c\"").code();
}

TEST(Version, OneApartEitherWayWorks) {
  for (const char* other : {"0.2.0", "0.3.0", "0.3.9", "0.4.0", "0.4.17", "0.3", "0.3.1-rc1"}) {
    EXPECT_EQ(Code("0.3.1", other), absl::StatusCode::kOk) << other;
  }
}

TEST(Version, FurtherApartIsRefused) {
  for (const char* other : {"0.1.9", "0.5.0", "1.3.1", "1.0.0"}) {
    EXPECT_EQ(Code("0.3.1", other), absl::StatusCode::kFailedPrecondition) << other;
    EXPECT_EQ(Code(other, "0.3.1"), absl::StatusCode::kFailedPrecondition) << other;
  }
}

TEST(Version, WhoToldNoneIsOfTheVersionWithoutTheField) {
  EXPECT_EQ(Code("0.1.0", ""), absl::StatusCode::kOk);
  EXPECT_EQ(Code("0.2.5", ""), absl::StatusCode::kOk);
  EXPECT_EQ(Code("0.3.0", ""), absl::StatusCode::kFailedPrecondition);
}

TEST(Version, WhatIsNoVersionIsRefused) {
  for (const std::string& other :
       {std::string("x"), std::string("1"), std::string("1.2.3.4"), std::string("1."),
        std::string(".1"), std::string("-1.2"), std::string("0. 1.0"), std::string("0.+1"),
        std::string("0.99999999999999999999"), std::string(1000, '1')}) {
    EXPECT_EQ(Code("0.1.0", other), absl::StatusCode::kInvalidArgument) << other;
  }
}

TEST(Version, TheMessageSaysWhoAndWhat) {
  EXPECT_THAT(std::string(CheckVersions("0.3.1", "0.5.0", "client \"c\"").message()),
              AllOf(HasSubstr("client \"c\" has version 0.5.0, here it is 0.3.1"),
                    HasSubstr("upgrade this one")));
  EXPECT_THAT(std::string(CheckVersions("0.3.1", "0.1.0", "client \"c\"").message()),
              HasSubstr("upgrade the other one"));
}

TEST(Version, ThisProgramsIsOne) {
  EXPECT_TRUE(CheckVersions(OwnVersion(), OwnVersion(), "it").ok()) << OwnVersion();
}

}  // namespace
}  // namespace muond
