// Files that were made to do harm: each is refused with what is wrong, and costs no memory to speak
// of.
#include "server/checkpoint/checkpoint_for_test.h"
#include "server/checkpoint/memory_file_system_for_test.h"
#include "server/checkpoint/safetensors.h"
#include "server/checkpoint/strict_json.h"

namespace muond::checkpoint {
namespace {

using ::testing::HasSubstr;

std::string Refused(const std::string& header, std::int64_t data_bytes) {
  const auto parsed = ParseSafetensorsHeader(
      header, kHeaderLengthBytes + static_cast<std::int64_t>(header.size()) + data_bytes);
  return parsed.ok() ? "accepted" : std::string(parsed.status().message());
}

std::string Entry(const char* name, const char* shape, const char* offsets,
                  const char* dtype = "F32") {
  return absl::StrFormat(R"("%s":{"dtype":"%s","shape":%s,"data_offsets":%s})", name, dtype, shape,
                         offsets);
}

TEST(Safetensors, ARightHeaderIsAccepted) {
  EXPECT_EQ(Refused("{" + Entry("a", "[2]", "[0,8]") + "," + Entry("b", "[1,1]", "[8,12]") + "}",
                    12),
            "accepted");
  EXPECT_EQ(Refused("{}", 0), "accepted");
  EXPECT_EQ(Refused("{" + Entry("a", "[]", "[0,4]") + "," + Entry("e", "[0]", "[4,4]") + "}", 4),
            "accepted");
}

TEST(Safetensors, OffsetsThatOverlapLeaveAHoleOrATailAreRefused) {
  const auto two = [](const char* first, const char* second) {
    return "{" + Entry("a", "[2]", first) + "," + Entry("b", "[2]", second) + "}";
  };
  EXPECT_THAT(Refused(two("[0,8]", "[4,12]"), 12), HasSubstr("overlaps"));
  EXPECT_THAT(Refused(two("[0,8]", "[0,8]"), 8), HasSubstr("overlaps"));
  EXPECT_THAT(Refused(two("[0,8]", "[12,20]"), 20), HasSubstr("a hole"));
  EXPECT_THAT(Refused(two("[4,12]", "[12,20]"), 20), HasSubstr("a hole"));
  EXPECT_THAT(Refused(two("[0,8]", "[8,16]"), 20), HasSubstr("end at byte"));
  EXPECT_THAT(Refused(two("[0,8]", "[8,16]"), 12), HasSubstr("end at byte"));
  EXPECT_THAT(Refused(two("[8,0]", "[8,16]"), 16), HasSubstr("hold -8 bytes"));
}

TEST(Safetensors, ShapesAndOffsetsThatCannotBeAreRefused) {
  EXPECT_THAT(Refused("{" + Entry("a", "[3]", "[0,8]") + "}", 8), HasSubstr("has 12"));
  EXPECT_THAT(Refused("{" + Entry("a", "[-2]", "[0,8]") + "}", 8), HasSubstr("no count"));
  EXPECT_THAT(Refused("{" + Entry("a", "[2]", "[0,8.0]") + "}", 8), HasSubstr("two counts"));
  EXPECT_THAT(Refused("{" + Entry("a", "[2]", "[0,8,9]") + "}", 8), HasSubstr("two counts"));
  EXPECT_THAT(Refused("{" + Entry("a", "[1,1,1,1,1,1,1,1,2]", "[0,8]") + "}", 8),
              HasSubstr("9 dimensions"));
  EXPECT_NE(Refused("{" + Entry("a", "[4611686018427387904,4]", "[0,0]") + "}", 0), "accepted");
  EXPECT_THAT(Refused("{" + Entry("a", "[1]", "[0,8]", "F64") + "}", 8), HasSubstr("F64"));
  EXPECT_THAT(Refused("{" + Entry("a", "[1]", "[18446744073709551615,3]") + "}", 4),
              HasSubstr("two counts"));
  EXPECT_THAT(Refused("[]", 0), HasSubstr("begin with"));
  EXPECT_THAT(Refused(" {}", 0), HasSubstr("begin with"));
  EXPECT_THAT(Refused(R"({"__metadata__":{"a":1}})", 0), HasSubstr("expected a string"));
}

TEST(Safetensors, ANameTwiceIsRefused) {
  EXPECT_THAT(Refused("{" + Entry("a", "[2]", "[0,8]") + "," + Entry("a", "[2]", "[8,16]") + "}",
                      16),
              HasSubstr("\"a\" stands there twice"));
}

TEST(Safetensors, AHeaderOfTwoHundredMegabytesIsRefusedBeforeItIsRead) {
  const unsigned char length[8] = {0, 0, 0, 12, 0, 0, 0, 0};  // 201,326,592
  constexpr std::int64_t kFile = std::int64_t{1} << 40;
  EXPECT_THAT(std::string(SafetensorsHeaderLength(length, kFile).status().message()),
              HasSubstr("allows 100000000"));
  const unsigned char all[8] = {255, 255, 255, 255, 255, 255, 255, 255};
  EXPECT_FALSE(SafetensorsHeaderLength(all, std::int64_t{1} << 40).ok());
  const unsigned char ten[8] = {10};
  EXPECT_THAT(std::string(SafetensorsHeaderLength(ten, 17).status().message()),
              HasSubstr("the file has 17"));
}

TEST(StrictJson, DeepNestingEndsEarly) {
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  EXPECT_FALSE(ParseStrictJson(deep).ok());
  const std::string closed = deep + std::string(100000, ']') + "}";
  EXPECT_THAT(std::string(ParseStrictJson(closed).status().message()), HasSubstr("too deep"));
  EXPECT_FALSE(ParseStrictJson("{\"a\":1}x").ok());
  EXPECT_FALSE(ParseStrictJson("{\"a\":NaN}").ok());
  EXPECT_FALSE(ParseStrictJson("").ok());
}

TEST(Paths, NamesThatLeadElsewhereAreRefused) {
  MemoryFileSystem files;
  for (const char* name : {"..", ".", "", "/etc/passwd", "a/b", "../x", "-x", ".hidden", "a\nb",
                           "a\\b", "x\xc3\xa9"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ValidatePath({"r", name}))) << name;
    EXPECT_TRUE(absl::IsInvalidArgument(files.Create({name}).status())) << name;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(ValidatePath({std::string(129, 'a')})));
  EXPECT_TRUE(ValidatePath({"ckpt-1", "part-0-0.safetensors"}).ok());
}

// A manifest is as little to be trusted as a header.
TEST(Paths, AManifestCannotNameAFileElsewhere) {
  MemoryFileSystem files;
  ASSERT_TRUE(Save(files, 1, 1).ok());
  Manifest manifest = *Store(files, "r").List()->front().manifest;
  for (const char* name : {"../../etc/shadow", "/etc/shadow", "manifest.json"}) {
    Manifest attack = manifest;
    attack.files[0].name = name;
    for (Parameter& parameter : attack.parameters) {
      for (StateTensor& tensor : parameter.tensors) {
        for (Piece& piece : tensor.pieces) piece.file = name;
      }
    }
    EXPECT_TRUE(absl::IsInvalidArgument(ParseManifest(ManifestText(attack)).status())) << name;
  }
  Manifest unlisted = manifest;
  unlisted.parameters[0].tensors[0].pieces[0].file = "other.safetensors";
  EXPECT_THAT(std::string(ParseManifest(ManifestText(unlisted)).status().message()),
              HasSubstr("is not listed"));
  Manifest twice = manifest;
  twice.files.push_back(twice.files[0]);
  EXPECT_FALSE(ParseManifest(ManifestText(twice)).ok());
}

}  // namespace
}  // namespace muond::checkpoint
