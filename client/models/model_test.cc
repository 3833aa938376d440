#include "client/models/model.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::models {
namespace {

Model Parsed(const std::string& name) {
  const auto model = ParseModel(name);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *model : Model();
}

std::int64_t Matrices(const Model& model) {
  std::int64_t count = 0;
  for (const ModelTensor& tensor : model.tensors) count += tensor.IsMuon() ? 1 : 0;
  return count;
}

TEST(Model, HasTheShapesOfTheRealOnes) {
  EXPECT_EQ(Parsed("gpt2").Elements(), 124'354'560);
  EXPECT_EQ(Matrices(Parsed("gpt2")), 48);
  EXPECT_EQ(Matrices(Parsed("llama1b")), 112);
  EXPECT_EQ(Parsed("llama1b").Elements(), 1'235'814'400);
  EXPECT_EQ(Matrices(Parsed("llama7b")), 224);
  EXPECT_EQ(Matrices(Parsed("llama70b")), 560);
  EXPECT_NEAR(static_cast<double>(Parsed("llama7b").Elements()), 6.6e9, 0.1e9);
  EXPECT_NEAR(static_cast<double>(Parsed("llama70b").Elements()), 68.7e9, 0.1e9);
  const Model part = Parsed("7b8");
  const Model whole = Parsed("llama7b");
  for (std::size_t i = 0; i + 1 < part.tensors.size(); ++i) {
    EXPECT_EQ(part.tensors[i].name, whole.tensors[i].name);
    EXPECT_EQ(part.tensors[i].shape, whole.tensors[i].shape);
  }
}

TEST(Model, NamesEachTensorOnce) {
  for (const char* name : {"tiny", "gpt2", "llama1b", "llama7b", "llama70b", "synthetic:100"}) {
    std::set<std::string> names;
    for (const ModelTensor& tensor : Parsed(name).tensors) {
      EXPECT_TRUE(names.insert(tensor.name).second) << name;
    }
  }
}

TEST(Model, SyntheticHasAsManyTensorsAsItSays) {
  for (const std::size_t count : {1, 2, 9, 10, 11, 1000}) {
    const Model model = Parsed("synthetic:" + std::to_string(count));
    EXPECT_EQ(model.tensors.size(), count);
    EXPECT_GE(Matrices(model), 1) << count;
  }
}

TEST(Model, RefusesWhatIsNone) {
  for (const char* name : {"", "llama", "gpt2 ", "synthetic:", "synthetic:0", "synthetic:-1",
                           "synthetic:1e3", "custom:", "custom:4", "custom:0x4", "custom:4x4,"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseModel(name).status())) << name;
  }
  EXPECT_THAT(std::string(ParseModel("lama").status().message()),
              testing::AllOf(testing::HasSubstr("model \"lama\""), testing::HasSubstr("llama70b")));
}

TEST(Model, BecomesARunOfOneRank) {
  const RunSpec run = MakeRunSpec(Parsed("tiny"), "r", Dtype::kBF16);
  EXPECT_EQ(run.name, "r");
  EXPECT_EQ(run.parameters.size(), Parsed("tiny").tensors.size());
  EXPECT_EQ(run.parameters[0].dtype, Dtype::kBF16);
  EXPECT_EQ(run.parameters[0].role, Role::kEmbedding);
}

}  // namespace
}  // namespace muond::models
