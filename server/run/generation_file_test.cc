#include "server/run/generation_file.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

class GenerationFileTest : public ::testing::Test {
 protected:
  GenerationFileTest() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "muond-generation-XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
  }
  ~GenerationFileTest() override { std::filesystem::remove_all(directory_); }
  std::string directory_;
};

TEST_F(GenerationFileTest, KeepsTheNewestRecordOfEachRun) {
  const GenerationFile one(directory_, "one"), other(directory_, "other");
  EXPECT_EQ(*one.Load(), std::nullopt);
  ASSERT_TRUE(one.Store({.generation = 1, .promised = 4}).ok());
  ASSERT_TRUE(one.Store({.generation = 4, .promised = 9}).ok());
  ASSERT_TRUE(other.Store({.generation = 2}).ok());
  EXPECT_EQ(**GenerationFile(directory_, "one").Load(), (GenerationRecord{4, 9}));
  EXPECT_EQ(**other.Load(), (GenerationRecord{2, 0}));
  one.Remove();
  EXPECT_EQ(*one.Load(), std::nullopt);
  EXPECT_TRUE((*other.Load()).has_value());
}

TEST_F(GenerationFileTest, DamageIsNamed) {
  const GenerationFile file(directory_, "run");
  for (const char* text : {"", "muond generation file 1\ngeneration 4\npromised 9\n",
                           "muond generation file 1\ngeneration 5\npromised 0\ncrc32c 00000000\n",
                           "something else"}) {
    std::ofstream(directory_ + "/run.generation") << text;
    const auto record = file.Load();
    EXPECT_EQ(record.status().code(), absl::StatusCode::kDataLoss) << text;
    EXPECT_THAT(std::string(record.status().message()), ::testing::HasSubstr("run.generation"));
  }
}

TEST_F(GenerationFileTest, ADirectoryThatIsNotThereIsAnError) {
  const GenerationFile file(directory_ + "/none", "run");
  EXPECT_EQ(file.Store({}).code(), absl::StatusCode::kUnavailable);
}

TEST(GenerationFileOff, KeepsNothing) {
  const GenerationFile file("", "run");
  EXPECT_TRUE(file.Store({.generation = 3}).ok());
  EXPECT_EQ(*file.Load(), std::nullopt);
}

}  // namespace
}  // namespace muond
