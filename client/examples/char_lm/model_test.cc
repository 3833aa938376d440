#include "client/examples/char_lm/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/tensor.h"

namespace muond::char_lm {
namespace {

constexpr ModelShape kShape = {.vocabulary = 11, .context = 3, .width = 4, .hidden = 8};

// A text in which each character follows from the two before it.
Tokens Sequence(std::size_t length) {
  Tokens text = {1, 2};
  while (text.size() < length) {
    text.push_back(static_cast<std::uint8_t>((text.end()[-1] * 3 + text.end()[-2] + 1) % 11));
  }
  return text;
}

Batch Examples(const Tokens& text, std::int64_t count) {
  Batch batch{.text = &text};
  for (std::int64_t i = 0; i < count; ++i) batch.starts.push_back(i * 3);
  return batch;
}

TEST(CharLmModel, GradientsAgreeWithFiniteDifferences) {
  Model model(kShape, 7);
  // Biases start at zero; give them values so that their part is no special case.
  std::mt19937_64 random(3);
  for (ModelParameter& parameter : model.parameters()) {
    if (parameter.role != Role::kBias) continue;
    for (float& value : parameter.value) value = static_cast<float>(random() % 1000) / 2000;
  }
  const Tokens text = Sequence(200);
  const Batch batch = Examples(text, 20);
  std::vector<std::vector<float>> gradients;
  model.Gradient(batch, 4.0, ActivationGradients::kF32, gradients);
  const float h = 0x1p-7f;  // fp32 forward: small enough for h^2, large enough for rounding
  for (std::size_t p = 0; p < model.parameters().size(); ++p) {
    ModelParameter& parameter = model.parameters()[p];
    double largest = 0, worst = 0;
    for (std::size_t i = 0; i < parameter.value.size(); ++i) {
      const float value = parameter.value[i];
      parameter.value[i] = value + h;
      const double up = model.Loss(batch);
      parameter.value[i] = value - h;
      const double down = model.Loss(batch);
      parameter.value[i] = value;
      const double numeric = 4.0 * (up - down) / (2 * h);
      largest = std::max(largest, std::abs(numeric));
      worst = std::max(worst, std::abs(numeric - gradients[p][i]));
    }
    EXPECT_GT(largest, 1e-3) << parameter.name;
    EXPECT_LT(worst, 1e-3 * largest + 2e-5) << parameter.name;
  }
}

TEST(CharLmModel, TheLossOfAnUntrainedModelIsNearTheUniformOne) {
  Model model(kShape, 1);
  const Tokens text = Sequence(200);
  EXPECT_NEAR(model.Loss(Examples(text, 60)), std::log(11.0), 0.5);
}

TEST(CharLmModel, ActivationGradientsOverflowWhenTheScaleIsTooLarge) {
  Model model(kShape, 7);
  const Tokens text = Sequence(200);
  const Batch batch = Examples(text, 20);
  std::vector<std::vector<float>> gradients;
  const auto finite = [&](double scale) {
    model.Gradient(batch, scale, ActivationGradients::kF16, gradients);
    return std::all_of(gradients.begin(), gradients.end(), [](const std::vector<float>& g) {
      return std::all_of(g.begin(), g.end(), [](float x) { return std::isfinite(x); });
    });
  };
  EXPECT_TRUE(finite(1024));
  EXPECT_FALSE(finite(0x1p24));
}

TEST(CharLmModel, ScaleOfAPowerOfTwoOnlyScales) {
  Model model(kShape, 7);
  const Tokens text = Sequence(200);
  const Batch batch = Examples(text, 20);
  std::vector<std::vector<float>> once, scaled;
  const double loss = model.Gradient(batch, 1.0, ActivationGradients::kF32, once);
  EXPECT_EQ(model.Gradient(batch, 64.0, ActivationGradients::kF32, scaled), loss);
  for (std::size_t p = 0; p < once.size(); ++p) {
    for (std::size_t i = 0; i < once[p].size(); ++i) ASSERT_EQ(scaled[p][i], 64 * once[p][i]);
  }
}

TEST(CharLmModel, ASeedDecidesEverything) {
  const Model a(kShape, 5), b(kShape, 5), c(kShape, 6);
  for (std::size_t p = 0; p < a.parameters().size(); ++p) {
    EXPECT_EQ(a.parameters()[p].value, b.parameters()[p].value);
  }
  EXPECT_NE(a.parameters()[0].value, c.parameters()[0].value);
}

// Plain gradient descent, here only to see that the gradients lead somewhere.
TEST(CharLmModel, LearnsASequenceThatHasARule) {
  Model model(kShape, 7);
  const Tokens text = Sequence(200);
  const Batch batch = Examples(text, 60);
  std::vector<std::vector<float>> gradients;
  const double before = model.Loss(batch);
  for (int step = 0; step < 400; ++step) {
    model.Gradient(batch, 1024.0, ActivationGradients::kF16, gradients);
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      for (std::size_t i = 0; i < gradients[p].size(); ++i) {
        model.parameters()[p].value[i] -= 0.5f / 1024 * gradients[p][i];
      }
    }
  }
  EXPECT_LT(model.Loss(batch), before / 10);
}

}  // namespace
}  // namespace muond::char_lm
