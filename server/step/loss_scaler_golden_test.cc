// torch.amp.GradScaler's own sequences, as recorded in tests/golden/scaler_*.json.
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/step/loss_scaler.h"

namespace muond {
namespace {

// Tests run in the source folder; MUOND_GOLDEN_DIR is for those who run them elsewhere.
std::string GoldenFile(const std::string& name) {
  const char* folder = std::getenv("MUOND_GOLDEN_DIR");
  return (folder != nullptr ? std::string(folder) : "tests/golden") + "/" + name;
}

class LossScalerGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(LossScalerGolden, TorchPolicyFollowsGradScaler) {
  std::ifstream file(GoldenFile(GetParam()));
  ASSERT_TRUE(file) << "can't read " << GoldenFile(GetParam());
  const nlohmann::json golden = nlohmann::json::parse(file);
  const auto flags = golden.at("found_inf").get<std::vector<bool>>();
  const auto scales = golden.at("scale_after").get<std::vector<double>>();
  ASSERT_EQ(flags.size(), scales.size());
  ASSERT_FALSE(flags.empty());

  LossScaleSpec spec;
  spec.mode = LossScaleMode::kDynamic;
  spec.policy = LossScalePolicy::kTorch;
  spec.initial = golden.at("initial_scale");
  spec.growth_factor = golden.at("growth_factor");
  spec.backoff_factor = golden.at("backoff_factor");
  spec.window = golden.at("growth_interval");
  ASSERT_TRUE(ValidateLossScale(spec).ok());
  LossScaler scaler(spec);
  for (std::size_t i = 0; i < flags.size(); ++i) {
    scaler.OnStep(!flags[i], flags[i] ? SkipCause::kOverflow : SkipCause::kNone, scaler.scale());
    ASSERT_EQ(scaler.scale(), scales[i]) << "after step " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Files, LossScalerGolden,
                         ::testing::Values("scaler_random.json", "scaler_start_storm.json"));

}  // namespace
}  // namespace muond
