// The check finds nothing in a right step and something in every wrong one.
#include "client/bench/sample_check.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond::bench {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::Field;

v1::RoutingReport RoutingOf(const models::Model& model) {
  v1::RoutingReport report;
  for (const models::ModelTensor& tensor : model.tensors) {
    v1::RoutedParameter* routed = report.add_parameters();
    routed->set_name(tensor.name);
    routed->set_algorithm(tensor.IsMuon() ? v1::ALGORITHM_MUON : v1::ALGORITHM_ADAMW);
  }
  return report;
}

// A daemon in fp64 beside the check: it reads the gradients from where they are pushed.
class SampleCheckTest : public testing::Test {
 protected:
  explicit SampleCheckTest(const std::string& model = "custom:8x8,24x16,4x12,300x200:adamw")
      : model_(*models::ParseModel(model)),
        gradients_(model_.Elements(), Dtype::kBF16),
        check_(model_, RoutingOf(model_), &gradients_) {
    gradients_.Fill(1, 1e-3f);
  }

  static Doubles Read(const Values& values, std::size_t first, std::size_t count) {
    Doubles read(count);
    for (std::size_t i = 0; i < count; ++i) read[i] = values.At(first + i);
    return read;
  }

  // `steps` steps with these rules; the masters of the last one go where the check wants them.
  void Train(int steps, const ReferenceMuon& muon, const ReferenceAdamW& adamw) {
    std::vector<Doubles> weights, m, v;
    for (const models::ModelTensor& tensor : model_.tensors) {
      weights.emplace_back(static_cast<std::size_t>(tensor.Elements()), 0.01);
      m.emplace_back(weights.back().size());
      v.emplace_back(weights.back().size());
    }
    for (int t = 1; t <= steps; ++t) {
      check_.BeginStep(static_cast<std::uint64_t>(t), 1e-3f);
      if (t == steps) Copy(weights, check_.Before());
      std::size_t first = 0;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const models::ModelTensor& tensor = model_.tensors[i];
        const Doubles gradient = Read(gradients_, first, weights[i].size());
        first += weights[i].size();
        if (tensor.IsMuon()) {
          ReferenceMomentum(muon, gradient, m[i]);
          weights[i] =
              ReferenceMuonStep(muon, weights[i], gradient, m[i], tensor.shape[0], tensor.shape[1]);
        } else {
          ReferenceMoments(adamw, gradient, m[i], v[i]);
          weights[i] = ReferenceAdamWStep(adamw, weights[i], m[i], v[i], t);
        }
      }
    }
    Copy(weights, check_.After());
  }

  void Copy(const std::vector<Doubles>& weights, const std::vector<client::SliceSink>& sinks) {
    for (const client::SliceSink& sink : sinks) {
      for (std::size_t i = 0; i < weights.size(); ++i) {
        if (model_.tensors[i].name != sink.parameter) continue;
        ASSERT_EQ(static_cast<std::size_t>(sink.elements), weights[i].size());
        std::copy(weights[i].begin(), weights[i].end(), static_cast<float*>(sink.data));
      }
    }
  }

  bool Passed(const std::string& algorithm) {
    bool passed = true;
    for (const SampleError& error : check_.Compare({}, {})) {
      if (error.algorithm == algorithm) passed = passed && error.passed();
    }
    return passed;
  }

  models::Model model_;
  Values gradients_;
  SampleCheck check_;
};

TEST_F(SampleCheckTest, TakesTheCheapestOfEachKind) {
  Train(1, {}, {});
  EXPECT_THAT(check_.Compare({}, {}), ElementsAre(Field(&SampleError::parameter, "w0"),
                                                  Field(&SampleError::parameter, "w2"),
                                                  Field(&SampleError::parameter, "w3")));
}

TEST_F(SampleCheckTest, PassesARightStep) {
  Train(3, {}, {});
  for (const SampleError& error : check_.Compare({}, {})) {
    EXPECT_TRUE(error.passed()) << error.parameter;
    EXPECT_LT(error.error, 1e-4) << error.parameter;
    EXPECT_GT(error.elements, 40);
  }
}

TEST_F(SampleCheckTest, FollowsAtMostSoManyElementsOfAdamW) {
  Train(1, {}, {});
  EXPECT_EQ(check_.Compare({}, {}).back().elements, 300 * 200);
}

TEST_F(SampleCheckTest, FindsAWrongLearningRate) {
  Train(3, {.lr = 1.02e-3}, {.lr = 1.02e-3});
  EXPECT_FALSE(Passed("muon"));
  EXPECT_FALSE(Passed("adamw"));
}

TEST_F(SampleCheckTest, FindsAForgottenWeightDecay) {
  Train(1, {.weight_decay = 0}, {.weight_decay = 0});
  EXPECT_FALSE(Passed("adamw"));
}

TEST_F(SampleCheckTest, FindsAWrongMomentum) {
  Train(4, {.momentum = 0.5}, {.beta1 = 0.5});
  EXPECT_FALSE(Passed("muon"));
  EXPECT_FALSE(Passed("adamw"));
}

TEST_F(SampleCheckTest, FindsAStepThatWasNotDone) {
  Train(2, {.lr = 0, .weight_decay = 0}, {.lr = 0, .weight_decay = 0});
  EXPECT_FALSE(Passed("muon"));
  EXPECT_FALSE(Passed("adamw"));
}

TEST_F(SampleCheckTest, WhatIsNotANumberDoesNotPass) {
  Train(2, {}, {});
  for (const client::SliceSink& sink : check_.After()) {
    static_cast<float*>(sink.data)[1] = std::numeric_limits<float>::quiet_NaN();
  }
  EXPECT_FALSE(Passed("muon"));
  EXPECT_FALSE(Passed("adamw"));
}

class LargeEmbedding : public SampleCheckTest {
 protected:
  LargeEmbedding() : SampleCheckTest("custom:1000x300:adamw") {}
};

TEST_F(LargeEmbedding, IsFollowedAtEvenSteps) {
  Train(2, {}, {});
  const auto errors = check_.Compare({}, {});
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0].elements, 300'000 / (300'000 / SampleCheck::kAdamWElements));
  EXPECT_TRUE(errors[0].passed());
}

}  // namespace
}  // namespace muond::bench
