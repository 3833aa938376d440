#include "client/cpp/slice_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muond::client {
namespace {

using ::testing::HasSubstr;

class SliceTableTest : public testing::Test {
 protected:
  SliceTableTest() {
    spec_.parameters.push_back({.name = "w", .shape = Dims{4, 8}, .dtype = Dtype::kBF16});
    spec_.parameters.push_back({.name = "other", .shape = Dims{3}});
    slices_["w"] = {Box{{0, 0}, {2, 8}}, Box{{2, 0}, {2, 8}}};
  }
  SliceTable Table() const { return SliceTable(spec_, 5, slices_); }
  static std::string Text(const absl::Status& status) { return std::string(status.message()); }

  RunSpec spec_;
  RankSlices slices_;
  float data_[32] = {};
};

TEST_F(SliceTableTest, TakesWhatFits) {
  const SliceSource good[] = {{"w", 0, data_, 16}, {"w", 1, data_, 16},
                              {"w", 1, data_, 16, Dtype::kF32, 1}};
  EXPECT_TRUE(Table().Check("push", good, 2).ok());
  const SliceSink sinks[] = {{"w", 0, data_, 16, Dtype::kBF16}};
  EXPECT_TRUE(Table().Check(sinks, false).ok());
}

TEST_F(SliceTableTest, NamesWhatIsWrongWithASource) {
  const auto check = [&](SliceSource source, std::int64_t micro_batches = 1) {
    return Table().Check("push for step 41", std::span(&source, 1), micro_batches);
  };
  EXPECT_EQ(Text(check({"nope", 0, data_, 16})),
            "parameter \"nope\": push for step 41: the run has no such parameter");
  EXPECT_EQ(Text(check({"other", 0, data_, 3})),
            "parameter \"other\": push for step 41 of slice 0: rank 5 registered 0 slices of it");
  EXPECT_TRUE(absl::IsNotFound(check({"w", 2, data_, 16})));
  EXPECT_TRUE(absl::IsNotFound(check({"w", -1, data_, 16})));
  EXPECT_EQ(Text(check({"w", 1, data_, 32})),
            "parameter \"w\": push for step 41 of slice 1: expected the 16 elements of "
            "[2:4, 0:8], got 32");
  EXPECT_THAT(Text(check({"w", 0, nullptr, 16})), HasSubstr("data is null"));
  EXPECT_THAT(Text(check({"w", 0, data_, 16, Dtype::kF32, 2}, 2)),
              HasSubstr("micro-batch 2 is not within 0..1"));
}

TEST_F(SliceTableTest, RefusesASliceGivenTwice) {
  const SliceSource twice[] = {{"w", 0, data_, 16}, {"w", 0, data_, 16}};
  EXPECT_THAT(Text(Table().Check("push", twice, 1)), HasSubstr("given twice"));
  const SliceSink sinks[] = {{"w", 0, data_, 16, Dtype::kBF16}, {"w", 0, data_, 16, Dtype::kBF16}};
  EXPECT_THAT(Text(Table().Check(sinks, false)), HasSubstr("given twice"));
}

TEST_F(SliceTableTest, RefusesASinkOfAnotherType) {
  const SliceSink sink[] = {{"w", 0, data_, 16, Dtype::kF32}};
  EXPECT_THAT(Text(Table().Check(sink, false)),
              HasSubstr("the sink takes f32, the values are bf16"));
  EXPECT_TRUE(Table().Check(sink, true).ok());
  const SliceSink half[] = {{"w", 0, data_, 16, Dtype::kBF16}};
  EXPECT_THAT(Text(Table().Check(half, true)), HasSubstr("the master weights are f32"));
}

TEST_F(SliceTableTest, NamesAbsentParametersItDoesNotKnow) {
  const std::string names[] = {"w", "gone"};
  EXPECT_THAT(Text(Table().CheckNames("finish step 1", names)), HasSubstr("parameter \"gone\""));
}

}  // namespace
}  // namespace muond::client
