// The story that began this project, told to its end: fp16 gradients, dynamic loss scaling from
// 65536, a true overflow at first, Muon. There the momentum turned NaN and no parameter ever moved.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

constexpr int kSteps = 30;
constexpr std::int64_t kWidth = 6;

// y = tanh(... tanh(x W1 * g1) ...) with ten parameters; a least-squares loss whose first gradients
// times 65536 are beyond fp16.
class TinyNetwork {
 public:
  static constexpr int kLayers = 5;

  static RunSpec Spec(const std::string& name) {
    std::vector<ParameterSpec> parameters;
    for (int layer = 0; layer < kLayers; ++layer) {
      parameters.push_back(Matrix("w" + std::to_string(layer), kWidth, kWidth));
      parameters.push_back(Vector("g" + std::to_string(layer), kWidth));
    }
    for (ParameterSpec& parameter : parameters) parameter.dtype = Dtype::kF16;
    RunSpec spec = SpecOf(parameters);
    spec.name = name;
    GroupOf(spec, "muon").muon = {.lr = .02, .weight_decay = .01};
    GroupOf(spec, "adamw").adamw = {.lr = .01, .weight_decay = .01};
    return spec;
  }

  static Tensors Initial() {
    Tensors values;
    for (int layer = 0; layer < kLayers; ++layer) {
      values["w" + std::to_string(layer)] = Noise(kWidth * kWidth, 100 + layer);
      values["g" + std::to_string(layer)] = Floats(kWidth, 1);
    }
    return values;
  }

  // Unscaled gradients at these weights; the loss on the side.
  static Tensors Gradients(const Tensors& weights, double* loss) {
    Tensors gradients;
    for (const auto& [name, values] : weights) gradients[name] = Floats(values.size(), 0);
    *loss = 0;
    for (int sample = 0; sample < 16; ++sample) {
      const Floats x = Noise(kWidth, 500 + sample), target = Noise(kWidth, 900 + sample % 4);
      *loss += AddSample(weights, x, target, gradients);
    }
    return gradients;
  }

 private:
  static double AddSample(const Tensors& weights, const Floats& x, const Floats& target,
                          Tensors& gradients) {
    std::vector<Floats> inputs, sums;
    Floats now = x;
    for (int layer = 0; layer < kLayers; ++layer) {
      const Floats& w = weights.at("w" + std::to_string(layer));
      const Floats& g = weights.at("g" + std::to_string(layer));
      Floats sum(kWidth, 0), next(kWidth);
      for (int i = 0; i < kWidth; ++i) {
        for (int j = 0; j < kWidth; ++j) sum[i] += w[i * kWidth + j] * now[j];
        next[i] = std::tanh(g[i] * sum[i]);
      }
      inputs.push_back(now);
      sums.push_back(sum);
      now = next;
    }
    double loss = 0;
    Floats back(kWidth);
    for (int i = 0; i < kWidth; ++i) {
      back[i] = 4 * (now[i] - target[i]);
      loss += 2 * (now[i] - target[i]) * (now[i] - target[i]);
    }
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      const Floats& w = weights.at("w" + std::to_string(layer));
      const Floats& g = weights.at("g" + std::to_string(layer));
      Floats below(kWidth, 0);
      for (int i = 0; i < kWidth; ++i) {
        const float out = std::tanh(g[i] * sums[layer][i]);
        const float inner = back[i] * (1 - out * out);
        gradients.at("g" + std::to_string(layer))[i] += inner * sums[layer][i];
        for (int j = 0; j < kWidth; ++j) {
          gradients.at("w" + std::to_string(layer))[i * kWidth + j] +=
              inner * g[i] * inputs[layer][j];
          below[j] += inner * g[i] * w[i * kWidth + j];
        }
      }
      back = below;
    }
    return loss;
  }
};

struct SentStep {
  Tensors gradients;  // unscaled
  StepOutcome outcome;
};

class OverflowStory : public ::testing::TestWithParam<LossScalePolicy> {
 protected:
  // Trains on what the trainer sees: fp16 parameters.
  std::vector<SentStep> Train(TestRun& run, int steps, std::vector<double>* losses) {
    std::vector<SentStep> sent;
    for (int step = 0; step < steps; ++step) {
      double loss = 0;
      Tensors gradients = TinyNetwork::Gradients(run.Pulled(), &loss);
      losses->push_back(loss);
      const StepOutcome outcome = run.Step(gradients);
      sent.push_back({std::move(gradients), outcome});
    }
    return sent;
  }

  RunSpec DynamicSpec(const std::string& name) {
    RunSpec spec = TinyNetwork::Spec(name);
    spec.loss_scale = {.mode = LossScaleMode::kDynamic, .policy = GetParam()};
    return spec;
  }

  std::unique_ptr<Service> service_ = StartService();
};
INSTANTIATE_TEST_SUITE_P(Policies, OverflowStory,
                         ::testing::Values(LossScalePolicy::kTorch, LossScalePolicy::kDeepSpeed,
                                           LossScalePolicy::kMegatron));

TEST_P(OverflowStory, DeepSpeed8432_TrainingSurvivesTheFirstOverflows) {
  TestRun run(*service_, DynamicSpec("run"), {.initial = TinyNetwork::Initial()});
  const Tensors at_first = run.Pulled();
  std::vector<double> losses;
  const std::vector<SentStep> sent = Train(run, kSteps, &losses);

  // The overflow is real: finite gradients that fp16 can't hold at that scale.
  EXPECT_EQ(sent[0].outcome.loss_scale, 65536);
  EXPECT_EQ(sent[0].outcome.cause, SkipCause::kOverflow);
  for (const auto& [name, values] : sent[0].gradients) {
    for (const float value : values) ASSERT_TRUE(std::isfinite(value)) << name;
  }
  // It ends: after some halvings every step is applied.
  EXPECT_LT(sent.back().outcome.loss_scale, 65536);
  EXPECT_TRUE(sent.back().outcome.applied);
  EXPECT_GT(sent.back().outcome.applied_steps, kSteps / 2);
  EXPECT_EQ(sent.back().outcome.applied_steps + sent.back().outcome.skipped_steps, kSteps);

  const v1::RunStatus status = run.Status();
  EXPECT_EQ(status.momentum_nonfinite(), 0);
  EXPECT_TRUE(std::isfinite(status.momentum_norm()));
  EXPECT_EQ(status.newton_schulz_calls(), TinyNetwork::kLayers * status.steps_applied());
  const Tensors at_last = run.Pulled();
  for (const auto& [name, values] : at_first) {
    EXPECT_NE(at_last.at(name), values) << name << " never moved";
    EXPECT_EQ(run.Describe(name).nonfinite_elements(), 0) << name;
    EXPECT_EQ(run.Describe(name).t(), sent.back().outcome.applied_steps) << name;
  }
  EXPECT_LT(losses.back(), .7 * losses.front()) << "it trains";
}

// Leaving the overflowing steps out, at the scales that the others were made with, is the same run:
// fp16 against fp16, byte by byte.
TEST_P(OverflowStory, TheOverflowsLeaveNoTrace) {
  TestRun run(*service_, DynamicSpec("run"), {.initial = TinyNetwork::Initial()});
  std::vector<double> losses;
  const std::vector<SentStep> sent = Train(run, kSteps, &losses);
  RunSpec spec = TinyNetwork::Spec("reference");
  spec.loss_scale.mode = LossScaleMode::kExternal;
  TestRun reference(*service_, spec, {.initial = TinyNetwork::Initial()});
  int applied = 0;
  for (const SentStep& step : sent) {
    if (!step.outcome.applied) continue;
    StepInput input{.gradients = {{step.gradients}}};
    input.begin.loss_scale = step.outcome.loss_scale;
    EXPECT_TRUE(reference.Step(input).applied);
    ++applied;
  }
  EXPECT_LT(applied, kSteps) << "something was left out";
  EXPECT_EQ(run.TensorDigest(), reference.TensorDigest());
  EXPECT_EQ(run.Pulled(), reference.Pulled());
}

// The control: without steps nothing moves, and steps that all overflow are no steps.
TEST_P(OverflowStory, NoAppliedStepMovesNothing) {
  TestRun run(*service_, DynamicSpec("run"), {.initial = TinyNetwork::Initial()});
  const Tensors at_first = run.Pulled();
  const std::string before = run.TensorDigest();
  EXPECT_EQ(run.Pulled(), at_first);
  Tensors gradients = NoiseFor(run.spec(), 1);
  gradients.at("w2")[3] = std::numeric_limits<float>::infinity();
  for (int step = 0; step < kSteps; ++step) EXPECT_FALSE(run.Step(gradients).applied);
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_EQ(run.Pulled(), at_first);
  EXPECT_LT(run.session().loss_scale(), 65536);
}

}  // namespace
}  // namespace muond::cluster
