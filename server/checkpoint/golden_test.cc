// A checkpoint that was written once and must be readable for ever: tests/golden/checkpoint_v1.
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "server/checkpoint/checkpoint_for_test.h"

namespace muond::checkpoint {
namespace {

// Tests run in the source tree.
constexpr char kGolden[] = "tests/golden/checkpoint_v1";

std::string Contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(GoldenCheckpoint, OfSchemaOneIsRead) {
  auto files = OpenFileSystem(kGolden);
  ASSERT_TRUE(files.ok()) << files.status();
  const auto listed = Store(**files, "r").List();
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 1u);
  const Listed& one = listed->front();
  ASSERT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(one.name, "ckpt-7");
  EXPECT_EQ(one.manifest->control, ControlOf(7));
  EXPECT_TRUE(CheckLayout(*one.manifest, SmallLayout(), false).ok());
  EXPECT_EQ(one.manifest->fingerprint, Fingerprint(SmallLayout()));
  for (const int readers : {1, 2, 3, 5}) {
    for (int reader = 0; reader < readers; ++reader) {
      const absl::Status loaded =
          LoadAndCompare(**files, {"r", one.name}, *one.manifest, reader, readers);
      EXPECT_TRUE(loaded.ok()) << loaded;
    }
  }
}

// Whoever changes a byte of what is written changes the format: a new schema, and a new golden one
// beside this.
TEST(GoldenCheckpoint, TheSameStateIsWrittenInTheSameBytes) {
  std::string root = (std::filesystem::temp_directory_path() / "muond-golden-XXXXXX").string();
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  const auto saved = Save(**OpenFileSystem(root), 7, 2, 2, {.piece_bytes = 48, .file_bytes = 400});
  ASSERT_TRUE(saved.ok()) << saved.status();
  int compared = 0;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/r/ckpt-7")) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(Contents(entry.path()), Contents(std::string(kGolden) + "/r/ckpt-7/" + name)) << name;
    ++compared;
  }
  EXPECT_GT(compared, 2);
  if (getenv("MUOND_KEEP_GOLDEN") == nullptr) std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace muond::checkpoint
