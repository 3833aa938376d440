// Parts: any cut on the way in, any cut on the way out.
#include "server/checkpoint/checkpoint_for_test.h"
#include "server/checkpoint/memory_file_system_for_test.h"
#include "server/checkpoint/safetensors.h"

namespace muond::checkpoint {
namespace {

using ::testing::HasSubstr;

Manifest Newest(FileSystem& files) {
  auto listed = Store(files, "r").List();
  MUOND_CHECK(listed.ok() && !listed->empty() && listed->front().status.ok(), "a checkpoint");
  return *listed->front().manifest;
}

// DeepSpeed #2898, #3810, #6441: the number of writers was baked into the files.
TEST(DeepSpeed2898, AnyNumberOfDaemonsReadsWhatAnyNumberWrote) {
  for (const int writers : {1, 2, 3, 5}) {
    for (const std::int64_t piece : {std::int64_t{8}, std::int64_t{20}, std::int64_t{1} << 20}) {
      MemoryFileSystem files;
      ASSERT_TRUE(Save(files, 7, writers, 2, {.piece_bytes = piece, .file_bytes = 60}).ok());
      const Manifest manifest = Newest(files);
      for (const int readers : {1, 2, 3, 5}) {
        for (int reader = 0; reader < readers; ++reader) {
          const absl::Status loaded =
              LoadAndCompare(files, {"r", "ckpt-7"}, manifest, reader, readers);
          EXPECT_TRUE(loaded.ok()) << writers << " -> " << readers << ": " << loaded;
        }
      }
    }
  }
}

SafetensorsHeader HeaderOf(FileSystem& files, const Path& path) {
  auto file = *files.Open(path);
  unsigned char first[8];
  MUOND_CHECK(file->Read(0, first, 8).ok(), "eight bytes");
  std::string text(*SafetensorsHeaderLength(first, file->size()), '\0');
  MUOND_CHECK(file->Read(8, text.data(), text.size()).ok(), "a header");
  auto header = ParseSafetensorsHeader(text, file->size());
  MUOND_CHECK(header.ok(), header.status().ToString());
  return *std::move(header);
}

TEST(Part, AWholeTensorHasItsLogicalNameAndShape) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1, 1).ok());
  std::map<std::string, Dims> shapes;
  const SafetensorsHeader header = HeaderOf(files, {"r", "ckpt-1", "part-0-0.safetensors"});
  for (const auto& tensor : header.tensors) {
    shapes[tensor.name] = tensor.shape;
  }
  const std::map<std::string, Dims> expected = {
      {"blk.0.norm.exp_avg", {3}}, {"blk.0.norm.exp_avg_sq", {3}}, {"blk.0.norm.master", {3}},
      {"blk.0.wq.master", {4, 3}}, {"blk.0.wq.momentum", {4, 3}},  {"embed.exp_avg", {5, 4}},
      {"embed.exp_avg_sq", {5, 4}}, {"embed.master", {5, 4}}};
  EXPECT_EQ(shapes, expected);
}

TEST(Part, ALargeTensorIsCutAlongItsRowsAndPaddingIsNeverStored) {
  MemoryFileSystem files;
  // 5 x 4 fp32 at 40 bytes a piece: two rows, two rows, one row.
  ASSERT_TRUE(Save(files, 1, 1, 2, {.piece_bytes = 40}).ok());
  std::map<std::string, Dims> shapes;
  std::int64_t bytes = 0;
  const SafetensorsHeader header = HeaderOf(files, {"r", "ckpt-1", "part-0-0.safetensors"});
  for (const auto& tensor : header.tensors) {
    shapes[tensor.name] = tensor.shape;
    bytes += tensor.end - tensor.begin;
  }
  EXPECT_EQ(shapes.at("embed.master[0:8]"), (Dims{2, 4}));
  EXPECT_EQ(shapes.at("embed.master[16:20]"), (Dims{1, 4}));
  EXPECT_EQ(bytes, 4 * (2 * 12 + 3 * 3 + 3 * 20));
}

TEST(Part, FilesEndAtTheirLimit) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1, 1, 2, {.file_bytes = 100}).ok());
  const Manifest manifest = Newest(files);
  EXPECT_GT(manifest.files.size(), 3u);
  EXPECT_TRUE(LoadAndCompare(files, {"r", "ckpt-1"}, manifest).ok());
}

// fairscale #50: fp32 state went through fp16 and back. torchtitan PR #4615: bf16 became fp32.
TEST(Fairscale50, EveryBitAndTheDtypeSurvive) {
  MemoryFileSystem files;
  const std::vector<float> exact = {0.1000001f, 1.0000001f, -0.0f, 1e-45f};
  const std::vector<std::uint16_t> half = {0x3f81, 0x8000, 0x0001, 0x7f7f};
  const ShardView shard{"w", {2, 2}, 0, 4, 3,
                        {{"master", Dtype::kF32, exact.data()},
                         {"momentum", Dtype::kBF16, half.data()}}};
  ASSERT_TRUE(files.MakeDirectory({"c"}).ok());
  const auto part = WritePart(files, {"c"}, 0, {&shard, 1});
  ASSERT_TRUE(part.ok()) << part.status();
  const auto manifest = Assemble(
      {{.name = "w", .shape = {2, 2}, .tensors = {{.name = "master"}, {.name = "momentum"}}}},
      {*part});
  ASSERT_TRUE(manifest.ok());
  EXPECT_EQ(manifest->parameters[0].tensors[1].dtype, Dtype::kBF16);
  std::vector<float> master(4);
  std::vector<std::uint16_t> momentum(4);
  ShardSink sink{"w", 0, 4, {{"master", Dtype::kF32, master.data()},
                             {"momentum", Dtype::kBF16, momentum.data()}}};
  ASSERT_TRUE(ReadShards(files, {"c"}, *manifest, {&sink, 1}).ok());
  // The bits, that of -0 too. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
  EXPECT_EQ(std::memcmp(master.data(), exact.data(), 16), 0);
  EXPECT_EQ(momentum, half);
  // A reader that expects fp32 is refused, not widened for.
  sink.tensors[1].dtype = Dtype::kF32;
  const absl::Status refused = ReadShards(files, {"c"}, *manifest, {&sink, 1});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("\"momentum\" is BF16 in the checkpoint, this run keeps it in F32"));
}

// KempnerForge PR #115, AReaL PR #1468: moments that were not in the file were silently dropped.
TEST(KempnerForge115, AKeyThatIsMissingOrTooManyIsAnError) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1, 1).ok());
  Manifest manifest = Newest(files);
  Manifest lacks = manifest;
  std::erase_if(lacks.parameters[0].tensors,
                [](const StateTensor& tensor) { return tensor.name == "exp_avg"; });
  const absl::Status many = LoadAndCompare(files, {"r", "ckpt-1"}, lacks);
  EXPECT_FALSE(many.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckLayout(lacks, SmallLayout(), false)));
  const absl::Status extra = Verify(files, {"r", "ckpt-1"}, lacks);
  EXPECT_THAT(std::string(extra.message()), HasSubstr("a key too many"));
  manifest.parameters[0].tensors[0].pieces[0].key = "other";
  EXPECT_THAT(std::string(Verify(files, {"r", "ckpt-1"}, manifest).message()),
              HasSubstr("key too many"));
}

// NVIDIA/TransformerEngine #1986: a step per file, null where a rank's group was empty.
TEST(TransformerEngine1986, TIsOfTheParameterAlsoWhereADaemonOwnsNothingOfIt) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 6, 5).ok());  // five daemons: some own nothing of the norm's 3 elements
  const Manifest manifest = Newest(files);
  for (const Parameter& parameter : manifest.parameters) EXPECT_EQ(parameter.t, 6);
}

TEST(Part, DaemonsThatDisagreeAboutTAreNotPutTogether) {
  Part one{.t = {{"embed", 3}}}, other{.t = {{"embed", 4}}};
  EXPECT_TRUE(absl::IsInternal(Assemble(SmallLayout(), {one, other}).status()));
}

// dion #18: state on the owner alone, a load by all hung. Here all report.
TEST(Dion18, ADaemonThatOwnsNothingTakesPart) {
  MemoryFileSystem files;
  ASSERT_TRUE(files.MakeDirectory({"c"}).ok());
  const auto part = WritePart(files, {"c"}, 3, {});
  ASSERT_TRUE(part.ok());
  EXPECT_TRUE(part->files.empty());
}

// DeepSpeed #8608, Megatron PR #5742: two moments hard-coded, whatever the algorithm.
TEST(DeepSpeed8608, EachParameterListsTheStateThatItsAlgorithmHas) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1, 2).ok());
  std::map<std::string, std::vector<std::string>> tensors;
  const Manifest manifest = Newest(files);
  for (const Parameter& parameter : manifest.parameters) {
    for (const StateTensor& tensor : parameter.tensors) {
      tensors[parameter.name].push_back(tensor.name);
    }
  }
  EXPECT_EQ(tensors["blk.0.wq"], (std::vector<std::string>{"master", "momentum"}));
  EXPECT_EQ(tensors["embed"], (std::vector<std::string>{"exp_avg", "exp_avg_sq", "master"}));
}

}  // namespace
}  // namespace muond::checkpoint
