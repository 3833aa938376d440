#include "client/models/model_file.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::models {
namespace {

using testing::HasSubstr;

TEST(ModelFile, AListOfParametersIsEnough) {
  const auto run = ParseModelFile(R"([
      {"name": "w", "shape": [4, 3]},
      {"name": "b", "shape": [], "group": "other", "dtype": "f16"}])",
                                  "m", Dtype::kBF16);
  ASSERT_TRUE(run.ok()) << run.status();
  ASSERT_EQ(run->parameters.size(), 2u);
  EXPECT_EQ(run->parameters[0].shape, (Dims{4, 3}));
  EXPECT_EQ(run->parameters[0].dtype, Dtype::kBF16);
  EXPECT_EQ(run->parameters[0].group, "all");
  EXPECT_EQ(run->parameters[1].shape, Dims());
  EXPECT_EQ(run->parameters[1].dtype, Dtype::kF16);
  ASSERT_EQ(run->groups.size(), 2u);
  EXPECT_EQ(run->groups[1].name, "other");
  EXPECT_EQ(run->groups[1].algorithm, Algorithm::kAuto);
}

TEST(ModelFile, HasEverythingThatAPlanDependsOn) {
  const auto run = ParseModelFile(R"({
      "dtype": "bf16", "world_size": 8,
      "groups": [{"name": "g", "algorithm": "muon", "coefficients": "custom",
                  "custom_steps": [3, -4, 2, 2, -1.5, 0.5], "momentum_dtype": "bf16"}],
      "rules": [{"pattern": ".*wo", "algorithm": "adamw"}],
      "parameters": [{"name": "qkv", "shape": [12, 6], "group": "g", "kind": "matrix",
                      "role": "hidden", "exclude": true, "replicated": true, "tie": "t",
                      "tie_reduction": "same", "allow_empty": true,
                      "split": {"sizes": [2, 2, 2], "groups": 2, "interleaved": true,
                                "per_head": true}}]})",
                                  "m", Dtype::kF32);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->world_size, 8);
  EXPECT_EQ(run->groups[0].custom_steps.size(), 6u);
  EXPECT_EQ(run->groups[0].algorithm, Algorithm::kMuon);
  EXPECT_EQ(run->groups[0].momentum_dtype, Dtype::kBF16);
  EXPECT_EQ(run->rules, (std::vector<RoutingRule>{{".*wo", Algorithm::kAdamW}}));
  ParameterSpec expected{.name = "qkv",
                         .shape = Dims{12, 6},
                         .allow_empty = true,
                         .dtype = Dtype::kBF16,
                         .group = "g",
                         .kind = Kind::kMatrix,
                         .role = Role::kHidden,
                         .exclude = true,
                         .replicated = true,
                         .tie = "t",
                         .tie_reduction = TieReduction::kSame,
                         .split = {{2, 2, 2}, 2, true, true}};
  EXPECT_EQ(run->parameters[0], expected);
}

TEST(ModelFile, SaysWhatIsWrongAndWhere) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "model file \"m\": no JSON: "},
      {"[{\"name\": \"w\", \"shape\": [1,]}]", "line 1, column 28"},
      {"7", "model file \"m\": expected an object, got 7"},
      {"[]", "model file \"m\": has no parameters"},
      {"{}", "model file \"m\": parameters: is missing"},
      {R"({"parameters": {}})", "model file \"m\": parameters: expected a list, got {}"},
      {R"({"parameters": [], "groops": []})",
       "key \"groops\" is not one of dtype, groups, parameters, rules, world_size"},
      {R"({"parameters": [], "world_size": 0})", "world_size: expected 1 or more"},
      {R"({"parameters": [], "world_size": 1.5})", "world_size: expected a whole number, got 1.5"},
      {R"([3])", "parameters[0]: expected an object, got 3"},
      {R"([{"shape": [4]}])", "parameters[0]: name: "},
      {R"([{"name": 5}])", "parameters[0] 5: name: expected a string, got 5"},
      {R"([{"name": "w", "shape": "big"}])",
       "parameters[0] \"w\": shape: expected a list of whole numbers, got \"big\""},
      {R"([{"name": "w", "shape": [1.5]}])", "expected a list of whole numbers, got [1.5]"},
      {R"([{"name": "w", "shape": [18446744073709551615]}])", "expected a list of whole numbers"},
      {R"([{"name": "w", "dtype": "fp8"}])", "dtype: expected one of f32, bf16, f16, got \"fp8\""},
      {R"([{"name": "w", "kind": 1}])", "kind: expected one of matrix, experts, "},
      {R"([{"name": "w", "role": "head"}])", "role: expected one of hidden, embedding, lm_head, "},
      {R"([{"name": "w", "exclude": "no"}])", "exclude: expected true or false, got \"no\""},
      {R"([{"name": "w", "size": 4}])", "parameters[0] \"w\": key \"size\" is not one of "},
      {R"([{"name": "w", "split": 3}])", "parameters[0] \"w\": split: expected an object, got 3"},
      {R"({"parameters": [], "groups": [{}]})", "groups[0]: name: is missing"},
      {R"({"parameters": [], "groups": [{"name": "g", "momentum_dtype": "f16"}]})",
       "momentum_dtype: expected one of f32, bf16, got \"f16\""},
      {R"({"parameters": [], "groups": [{"name": "g", "coefficients": "custom"}]})",
       "custom_steps: expected three numbers for each step"},
      {R"({"parameters": [], "groups": [{"name": "g", "custom_steps": [1]}]})",
       "custom_steps: only with coefficients \"custom\""},
      {R"({"parameters": [], "groups": [{"name": "g", "algorithm": "sgd"}]})",
       "groups[0] \"g\": algorithm: expected one of auto, muon, adamw, got \"sgd\""},
      {R"({"parameters": [], "rules": [{"pattern": 1}]})", "rules[0]: pattern: expected a string"},
  };
  for (const auto& [text, says] : cases) {
    const auto run = ParseModelFile(text, "m", Dtype::kF32);
    EXPECT_TRUE(absl::IsInvalidArgument(run.status())) << text;
    EXPECT_THAT(std::string(run.status().message()), HasSubstr(says)) << text;
  }
}

TEST(ModelFile, FilesThatCannotBeReadAreNotFound) {
  for (const char* path : {"/nonexistent/model.json", "/"}) {
    const auto run = LoadModelFile(path, Dtype::kF32);
    EXPECT_TRUE(absl::IsNotFound(run.status())) << run.status();
    EXPECT_THAT(std::string(run.status().message()), HasSubstr(path));
  }
}

}  // namespace
}  // namespace muond::models
