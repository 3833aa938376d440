// `muonctl checkpoint` on directories: nothing of it asks a daemon.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/cli/muonctl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace muond::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Tests run in the source tree.
constexpr char kGolden[] = "tests/golden/checkpoint_v1";

class CheckpointVerbs : public ::testing::Test {
 protected:
  CheckpointVerbs() {
    std::string pattern = (std::filesystem::temp_directory_path() / "muonctl-XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    std::filesystem::copy(kGolden, root_, std::filesystem::copy_options::recursive);
  }
  ~CheckpointVerbs() override { std::filesystem::remove_all(root_); }

  int Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "checkpoint");
    out_.str("");
    err_.str("");
    return RunMuonctl(arguments, {.out = out_, .err = err_});
  }
  // One bit of the file.
  void Damage(const std::string& name) {
    std::fstream file(root_ + "/r/ckpt-7/" + name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(-1, std::ios::end);
    file.put(byte);
  }

  std::string root_;
  std::ostringstream out_, err_;
};

TEST_F(CheckpointVerbs, ListShowsWhatThereIs) {
  ASSERT_EQ(Run({"list", root_, "-o", "json"}), 0) << err_.str();
  const auto json = nlohmann::json::parse(out_.str());
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0]["name"], "ckpt-7");
  EXPECT_EQ(json[0]["step"], 7);
  EXPECT_EQ(json[0]["daemons"], 2);
  EXPECT_EQ(json[0]["complete"], true);
  EXPECT_EQ(Run({"list", root_}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("ckpt-7"));
}

TEST_F(CheckpointVerbs, VerifyFindsADamagedFileThatListCannot) {
  EXPECT_EQ(Run({"verify", root_}), 0) << out_.str();
  Damage("part-1-0.safetensors");
  EXPECT_EQ(Run({"list", root_}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("complete"));
  EXPECT_EQ(Run({"verify", root_}), 3);
  EXPECT_THAT(out_.str(), HasSubstr("part-1-0.safetensors"));
  EXPECT_THAT(out_.str(), HasSubstr("crc32c"));
}

TEST_F(CheckpointVerbs, ShowHasPositionAndParameters) {
  ASSERT_EQ(Run({"show", root_, "ckpt-7"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("loss_scale       32768"));
  EXPECT_THAT(out_.str(), HasSubstr("blk.0.wq"));
  EXPECT_EQ(Run({"show", root_, "ckpt-8"}), 1);
  EXPECT_EQ(Run({"show", root_, "../r"}), 1);
}

TEST_F(CheckpointVerbs, DiffOfOneWithItselfIsEmpty) {
  EXPECT_EQ(Run({"diff", root_, "ckpt-7", "ckpt-7"}), 0);
  Damage("part-1-0.safetensors");
  EXPECT_EQ(Run({"diff", root_, "ckpt-7", "ckpt-7"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("crc32c"));
}

TEST_F(CheckpointVerbs, PruneKeepsTheNewestAndRemovesLeftovers) {
  std::filesystem::create_directory(root_ + "/r/saving-8-abc");
  EXPECT_EQ(Run({"prune", root_}), 2);
  EXPECT_EQ(Run({"prune", root_, "--keep", "0"}), 2);
  EXPECT_EQ(Run({"prune", root_, "--keep", "1"}), 0);
  EXPECT_TRUE(std::filesystem::exists(root_ + "/r/ckpt-7"));
  EXPECT_FALSE(std::filesystem::exists(root_ + "/r/saving-8-abc"));
}

TEST_F(CheckpointVerbs, ADirectoryThatIsNotThereIsSaidSo) {
  EXPECT_EQ(Run({"list", root_ + "/none"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("/none"));
  EXPECT_THAT(err_.str(), Not(HasSubstr("daemon")));
}

}  // namespace
}  // namespace muond::cli
