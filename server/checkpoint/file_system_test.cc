// The real file system, in a directory that goes away.
#include "server/checkpoint/file_system.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "server/checkpoint/checkpoint_for_test.h"

namespace muond::checkpoint {
namespace {

using ::testing::HasSubstr;

class RealFiles : public ::testing::Test {
 protected:
  RealFiles() {
    std::string pattern = (std::filesystem::temp_directory_path() / "muond-ckpt-XXXXXX").string();
    MUOND_CHECK(mkdtemp(pattern.data()) != nullptr, "a directory");
    root_ = pattern;
    auto files = OpenFileSystem(root_);
    MUOND_CHECK(files.ok(), files.status().ToString());
    files_ = *std::move(files);
  }
  ~RealFiles() override { std::filesystem::remove_all(root_); }

  std::string root_;
  std::unique_ptr<FileSystem> files_;
};

TEST_F(RealFiles, ASavedCheckpointLoadsAndOldOnesGo) {
  for (const int step : {1, 2, 3}) {
    const auto saved = Save(*files_, step, 3);
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  const auto listed = Store(*files_, "r").List();
  ASSERT_EQ(listed->size(), 2u);
  for (const Listed& one : *listed) {
    ASSERT_TRUE(one.status.ok()) << one.status;
    EXPECT_TRUE(LoadAndCompare(*files_, {"r", one.name}, *one.manifest).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(root_ + "/r/ckpt-1"));
}

TEST_F(RealFiles, NothingIsReplaced) {
  ASSERT_TRUE(files_->MakeDirectory({"a"}).ok());
  ASSERT_TRUE(files_->MakeDirectory({"b"}).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(files_->MakeDirectory({"a"})));
  EXPECT_TRUE(absl::IsAlreadyExists(files_->Rename({"a"}, {"b"})));
  ASSERT_TRUE(files_->Create({"f"}).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(files_->Create({"f"}).status()));
  EXPECT_TRUE(absl::IsNotFound(files_->Open({"none"}).status()));
}

TEST_F(RealFiles, NoLinkIsFollowedAnywhereBelowTheRoot) {
  std::filesystem::create_directory(root_ + "/real");
  ASSERT_TRUE(files_->Create({"real", "f"}).ok());
  std::filesystem::create_directory_symlink(root_ + "/real", root_ + "/link");
  std::filesystem::create_symlink(root_ + "/real/f", root_ + "/real/g");
  EXPECT_TRUE(absl::IsFailedPrecondition(files_->Open({"link", "f"}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(files_->Open({"real", "g"}).status()));
  EXPECT_FALSE(files_->Create({"link", "new"}).ok());
  EXPECT_FALSE(files_->RemoveFile({"link", "f"}).ok());
  EXPECT_FALSE(files_->List({"link"}).ok());
  EXPECT_TRUE(std::filesystem::exists(root_ + "/real/f"));
  // Neither is listed: a checkpoint that is a link does not exist.
  EXPECT_EQ(files_->List({})->size(), 1u);
}

TEST_F(RealFiles, APipeIsNoFileAndNobodyWaitsForItsWriter) {
  ASSERT_EQ(mkfifo((root_ + "/pipe").c_str(), 0600), 0);
  EXPECT_THAT(std::string(files_->Open({"pipe"}).status().message()), HasSubstr("no regular file"));
}

TEST_F(RealFiles, AReadOnlyDirectorySaysSo) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write anywhere: rights can't be tested";
  chmod(root_.c_str(), 0500);
  EXPECT_TRUE(absl::IsPermissionDenied(files_->MakeDirectory({"a"})));
  EXPECT_TRUE(absl::IsPermissionDenied(Save(*files_, 1).status()));
  chmod(root_.c_str(), 0700);
}

TEST(RealRoot, MustBeThere) {
  EXPECT_TRUE(absl::IsNotFound(OpenFileSystem("/nonexistent/muond").status()));
}

}  // namespace
}  // namespace muond::checkpoint
