#include "nccl/library.h"

#include <stdlib.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::nccl {
namespace {

using testing::HasSubstr;

TEST(NcclLibrary, OneThatIsMissingIsNamed) {
  const auto library = Load("/nowhere/libnccl.so.2");
  ASSERT_FALSE(library.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(library.status()));
  EXPECT_THAT(std::string(library.status().message()), HasSubstr("/nowhere/libnccl.so.2"));
}

TEST(NcclLibrary, OneThatIsSomethingElseIsRefused) {
  const auto library = Load("libm.so.6");
  ASSERT_FALSE(library.ok());
  EXPECT_THAT(std::string(library.status().message()), HasSubstr("it has no ncclGetVersion"));
}

TEST(NcclLibrary, LoadsWhereItIsInstalledAndTurnsMulticastOff) {
  unsetenv("NCCL_NVLS_ENABLE");
  const auto library = Load();
  if (!library.ok()) GTEST_SKIP() << library.status();
  EXPECT_GE((*library)->version, 21800);
  EXPECT_STREQ(getenv("NCCL_NVLS_ENABLE"), "0");
  EXPECT_EQ(*Load(), *library);
}

TEST(NcclLibrary, TheOperatorsWordOnMulticastStands) {
  setenv("NCCL_NVLS_ENABLE", "1", 1);
  (void)Load("/nowhere/libnccl.so.3");
  EXPECT_STREQ(getenv("NCCL_NVLS_ENABLE"), "1");
  unsetenv("NCCL_NVLS_ENABLE");
}

TEST(NcclLibrary, VersionsMustBeAlike) {
  EXPECT_EQ(VersionText(22809), "2.28.9");
  EXPECT_EQ(VersionText(2708), "2.7.8");
  EXPECT_EQ(VersionText(0), "none");
  EXPECT_TRUE(CheckVersions(22809, 22809).ok());
  const absl::Status other = CheckVersions(22809, 22803);
  EXPECT_THAT(std::string(other.message()), HasSubstr("the daemon has version 2.28.9"));
  EXPECT_THAT(std::string(other.message()), HasSubstr("the trainer 2.28.3"));
  EXPECT_FALSE(CheckVersions(22809, 0).ok());
}

}  // namespace
}  // namespace muond::nccl
