// Manifests: text and back; what differs between a checkpoint and a run.
#include "server/checkpoint/manifest.h"

#include "proto/crc32c.h"
#include "server/checkpoint/checkpoint_for_test.h"
#include "server/checkpoint/memory_file_system_for_test.h"

namespace muond::checkpoint {
namespace {

using ::testing::HasSubstr;

Manifest SavedBy(int daemons) {
  MemoryFileSystem files;
  MUOND_CHECK(Save(files, 9, daemons).ok(), "saved");
  return *Store(files, "r").List()->front().manifest;
}

TEST(Manifest, EveryFieldComesBack) {
  Manifest manifest = SavedBy(3);
  manifest.control.last_outcome = StepOutcome{.step = 8,
                                              .applied = false,
                                              .cause = SkipCause::kStateOverflow,
                                              .loss_scale = 0.1,
                                              .next_loss_scale = 1.0 / 3,
                                              .grad_norm = 1e-300,
                                              .clip_coefficient = 0.7,
                                              .applied_steps = 5,
                                              .skipped_steps = 4,
                                              .consecutive_skips = 2,
                                              .newton_schulz_calls = 11,
                                              .newton_schulz_fallbacks = 12,
                                              .zero_inputs = 13,
                                              .nonfinite_elements = 14,
                                              .version = 9,
                                              .offenders = {"a", "b"}};
  manifest.control.scaler = {1.0 / 7, 1, 2, 3};
  manifest.control.counters = {4, 5, 6};
  manifest.parameters[0].tied = {"lm_head"};
  const auto parsed = ParseManifest(ManifestText(manifest));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, manifest);
}

TEST(Manifest, BeforeTheFirstStepThereIsNoOutcome) {
  Manifest manifest = SavedBy(1);
  manifest.control.last_outcome.reset();
  EXPECT_EQ(*ParseManifest(ManifestText(manifest)), manifest);
}

// The text with a field changed and the checksum made right again.
std::string Edited(const Manifest& manifest, const std::string& from, const std::string& to) {
  std::string text = ManifestText(manifest);
  const std::size_t at = text.find(from);
  MUOND_CHECK(at != std::string::npos, from);
  text.replace(at, from.size(), to);
  const std::string rest = text.substr(text.find('\n') + 1);
  return absl::StrFormat("{\"crc32c\":\"%08x\",\n", Crc32c(rest.data(), rest.size())) + rest;
}

TEST(Manifest, ANewerSchemaIsToldApartFromDamage) {
  const auto parsed = ParseManifest(Edited(SavedBy(1), "\"schema\": 1", "\"schema\": 2"));
  EXPECT_TRUE(absl::IsUnimplemented(parsed.status())) << parsed.status();
}

TEST(Manifest, WhatCannotBeIsRefusedByName) {
  const Manifest manifest = SavedBy(2);
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"\"step\": 9,\n", "\"step\": -9,\n", "step"},
      {"\"format\": \"muond-checkpoint\"", "\"format\": \"other\"", "format"},
      {"\"scale\": 32768.0", "\"scale\": 0.0", "loss scale"},
      {"\"scale\": 32768.0", "\"scale\": \"x\"", "\"scale\": expected a number"},
      {"\"daemons\": 2", "\"daemonz\": 2", "\"daemons\": expected an integer, there is none"},
      {"\"first\": 0", "\"first\": 1", "don't follow each other"},
      {"\"elements\": 6", "\"elements\": 5", "pieces"},
      {"\"lr\": 0.0001", "\"lr\": -1", "lr"},
      {"\"dtype\": \"F32\"", "\"dtype\": \"F64\"", "F64"},
      {"\"run\": \"r\"", "\"run\": \"../r\"", "run"},
      {"\"generation\": 2", "\"generation\": 99999999999999999999", "generation"},
  };
  for (const auto& [from, to, says] : cases) {
    const auto parsed = ParseManifest(Edited(manifest, from, to));
    EXPECT_FALSE(parsed.ok()) << to;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(says)) << to;
  }
}

TEST(Layout, SameRunHasTheSameFingerprintAndAnyChangeAnother) {
  const std::string fingerprint = Fingerprint(SmallLayout());
  EXPECT_EQ(fingerprint, Fingerprint(SmallLayout()));
  std::vector<Parameter> other = SmallLayout();
  other[0].shape[0] += 1;
  EXPECT_NE(fingerprint, Fingerprint(other));
  other = SmallLayout();
  other[1].momentum_form = "sum";
  EXPECT_NE(fingerprint, Fingerprint(other));
  RunSpec halved = SmallRun();
  for (GroupSpec& group : halved.groups) group.momentum_dtype = Dtype::kBF16;
  EXPECT_NE(fingerprint, Fingerprint(LayoutOf(halved, *RouteParameters(halved))));
}

TEST(Layout, TheFirstDifferenceIsNamedWithBothValues) {
  const Manifest manifest = SavedBy(1);
  const auto check = [&](const RunSpec& spec) {
    const auto routing = RouteParameters(spec);
    MUOND_CHECK(routing.ok(), routing.status().ToString());
    return std::string(CheckLayout(manifest, LayoutOf(spec, *routing), false).message());
  };
  EXPECT_EQ(check(SmallRun()), "");
  RunSpec spec = SmallRun();
  spec.parameters[2].shape = {5, 5};
  EXPECT_THAT(check(spec), HasSubstr("shape: the checkpoint has [5, 4], the run has [5, 5]"));
  spec = SmallRun();
  spec.parameters[0].exclude = true;
  EXPECT_THAT(check(spec), HasSubstr("algorithm: the checkpoint has muon, the run has adamw"));
  spec = SmallRun();
  spec.groups[0].momentum_sum_form = true;
  EXPECT_THAT(check(spec), HasSubstr("momentum form: the checkpoint has ema, the run has sum"));
  spec = SmallRun();
  spec.groups[0].momentum_dtype = Dtype::kBF16;
  EXPECT_THAT(check(spec), HasSubstr("state tensors: the checkpoint has master f32, momentum f32, "
                                     "the run has master f32, momentum bf16"));
  spec = SmallRun();
  spec.parameters.pop_back();
  EXPECT_THAT(check(spec), HasSubstr("\"embed\": restore: the checkpoint has it, the run does"));
  spec = SmallRun();
  spec.parameters.push_back(Tensor("new", {3}, Role::kNorm));
  EXPECT_THAT(check(spec), HasSubstr("\"new\": restore: the checkpoint lacks it"));
}

TEST(Layout, AFingerprintThatIsNotOfItsParametersIsRefused) {
  Manifest manifest = SavedBy(1);
  const auto layout = LayoutOf(SmallRun(), *RouteParameters(SmallRun()));
  EXPECT_TRUE(CheckLayout(manifest, layout, false).ok());
  manifest.fingerprint[0] ^= 1;
  EXPECT_THAT(std::string(CheckLayout(manifest, layout, true).message()),
              HasSubstr("is not that of its parameters"));
  manifest.fingerprint.clear();  // imported
  EXPECT_TRUE(CheckLayout(manifest, layout, false).ok());
}

// Megatron PR #7117, torchtitan: the same key under another logical view was loaded silently.
TEST(Megatron7117, AWholeMatrixIsNotLoadedIntoASplitOne) {
  const Manifest manifest = SavedBy(1);
  RunSpec spec = SmallRun();
  spec.parameters[0].split.sizes = {2, 1, 1};
  const auto layout = LayoutOf(spec, *RouteParameters(spec));
  EXPECT_THAT(std::string(CheckLayout(manifest, layout, false).message()),
              HasSubstr("matrices (kind and split): the checkpoint has 4x3 @ 0+4, the run has "
                        "2x3 @ 0+2; 1x3 @ 2+1; 1x3 @ 3+1"));
  EXPECT_TRUE(CheckLayout(manifest, layout, true).ok());
}

TEST(Layout, VeryManyMatricesAreToldApartByTheirHash) {
  std::vector<MatrixBlock> many(200, {4, 4, {{0, 4}}});
  for (std::size_t i = 0; i < many.size(); ++i) many[i].ranges[0].begin = 4 * i;
  const std::string text = MatricesText(many);
  EXPECT_LT(text.size(), 100u);
  many.back().ranges[0].begin += 1;
  EXPECT_NE(text, MatricesText(many));
}

}  // namespace
}  // namespace muond::checkpoint
