// Which checkpoints there are, which is the newest, which go.
#include "server/checkpoint/checkpoint_for_test.h"
#include "server/checkpoint/memory_file_system_for_test.h"

namespace muond::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<Listed> ListOf(FileSystem& files, const std::string& run = "r") {
  auto listed = Store(files, run).List();
  MUOND_CHECK(listed.ok(), listed.status().ToString());
  return *std::move(listed);
}

std::vector<std::string> Names(FileSystem& files) {
  std::vector<std::string> names;
  for (const Listed& one : ListOf(files)) names.push_back(one.name);
  return names;
}

TEST(Store, ARunWithoutADirectoryHasNone) {
  MemoryFileSystem files;
  EXPECT_TRUE(Store(files, "r").List()->empty());
  EXPECT_TRUE(Store(files, "r").Prune(1)->empty());
}

TEST(Store, TheNewestComesFirstAndTheOldestGo) {
  MemoryFileSystem files;
  for (const int step : {1, 9, 10, 11}) ASSERT_TRUE(Save(files, step, 1, 3).ok());
  EXPECT_THAT(Names(files), ElementsAre("ckpt-11", "ckpt-10", "ckpt-9"));
}

// The run went back and took other steps: what it saves then is newer, whatever its number.
TEST(Store, AfterGoingBackTheNewOnesAreTheNewest) {
  MemoryFileSystem files;
  for (const int step : {5, 10, 15}) ASSERT_TRUE(Save(files, step, 1, 9).ok());
  ASSERT_EQ(*Save(files, 10, 1, 9), "ckpt-10.4");
  EXPECT_THAT(Names(files), ElementsAre("ckpt-10.4", "ckpt-15", "ckpt-10", "ckpt-5"));
  ASSERT_TRUE(Store(files, "r").Prune(2).ok());
  EXPECT_THAT(Names(files), ElementsAre("ckpt-10.4", "ckpt-15"));
}

// NVIDIA/Megatron-LM #2625, Megatron-Bridge #2307: each save overwrote the files of the last.
TEST(MegatronBridge2307, EachSaveHasADirectoryOfItsOwn) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1).ok());
  ASSERT_TRUE(Save(files, 2).ok());
  Store store(files, "r");
  ASSERT_TRUE(store.Begin(3, "killed").ok());  // a save that never ended
  for (const Listed& one : ListOf(files)) {
    EXPECT_TRUE(LoadAndCompare(files, store.PathOf(one.name), *one.manifest).ok()) << one.name;
  }
  EXPECT_THAT(Names(files), ElementsAre("ckpt-2", "ckpt-1"));
  ASSERT_TRUE(store.Prune(2).ok());
  EXPECT_EQ(files.List({"r"})->size(), 2u);
}

TEST(Store, PruningLeavesTheSaveThatIsUnderWay) {
  MemoryFileSystem files;
  Store store(files, "r");
  const std::string saving = *store.Begin(3, "a");
  ASSERT_TRUE(store.Prune(1, saving).ok());
  EXPECT_EQ(files.List({"r"})->size(), 1u);
}

TEST(Store, ADamagedOneIsListedWithTheReasonAndNotCounted) {
  MemoryFileSystem files;
  for (const int step : {1, 2, 3}) ASSERT_TRUE(Save(files, step, 1, 3).ok());
  files.Damage({"r", "ckpt-3", "manifest.json"}, 100);
  const auto listed = ListOf(files);
  EXPECT_EQ(listed[0].name, "ckpt-2");
  EXPECT_EQ(listed[2].name, "ckpt-3");
  EXPECT_THAT(std::string(listed[2].status.message()), HasSubstr("checksum is wrong"));
  // It is left where it is, and two good ones stay beside it.
  ASSERT_TRUE(Store(files, "r").Prune(2).ok());
  EXPECT_THAT(Names(files), ElementsAre("ckpt-2", "ckpt-1", "ckpt-3"));
}

TEST(Store, AnotherRunsCheckpointIsNotOurs) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1).ok());
  ASSERT_TRUE(files.Rename({"r"}, {"other"}).ok());
  const auto listed = ListOf(files, "other");
  EXPECT_TRUE(absl::IsFailedPrecondition(listed[0].status));
  EXPECT_THAT(std::string(listed[0].status.message()), HasSubstr("belongs to run \"r\""));
}

TEST(Store, OnlyNamesOfOursAreCheckpoints) {
  EXPECT_EQ(StepOfName("ckpt-12"), 12);
  EXPECT_EQ(StepOfName("ckpt-12.7"), 12);
  for (const char* name : {"ckpt-", "ckpt-x", "ckpt-1.", "ckpt-1.x", "saving-1-a", "ckpt--1",
                           "ckpt-99999999999999999999", "deleting-ckpt-1"}) {
    EXPECT_FALSE(StepOfName(name)) << name;
  }
}

}  // namespace
}  // namespace muond::checkpoint
