// The diagnostics of a commit against plain loops over the tensors that it leaves behind.
#include "server/engine/diagnostics.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/engine/rules.h"
#include "tests/support/device_like_backend.h"

namespace muond {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Tensor = std::vector<float>;

double Dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}
double Norm(const Tensor& a) { return std::sqrt(Dot(a, a)); }

// after - factor * before
Tensor Difference(const Tensor& after, const Tensor& before, double factor) {
  Tensor result(after.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    result[i] = static_cast<float>(after[i] - factor * before[i]);
  }
  return result;
}

// |O^T O - I|_F / sqrt(k) of a rows x cols matrix with rows <= cols.
double PlainResidual(const Tensor& o, int rows, int cols) {
  double sum = 0;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < rows; ++j) {
      double product = i == j ? -1 : 0;
      for (int c = 0; c < cols; ++c) {
        product += static_cast<double>(o[i * cols + c]) * o[j * cols + c];
      }
      sum += product * product;
    }
  }
  return std::sqrt(sum / rows);
}

enum class Kind { kReference, kDevice, kCpu };

// A 24 x 40 Muon matrix "w" and an AdamW vector "b" of 100 elements.
class CommitDiagnosticsTest : public ::testing::TestWithParam<Kind> {
 protected:
  static constexpr int kRows = 24, kCols = 40, kBias = 100;

  CommitDiagnosticsTest() {
    backend_ = GetParam() == Kind::kCpu ? kernels::MakeCpuBackend({.threads = 1})
                                        : kernels::MakeReferenceBackend();
    if (GetParam() == Kind::kDevice) {
      backend_ = testing::MakeDeviceLikeBackend(std::move(backend_));
    }
    spec_.name = "run";
    GroupSpec group{.name = "all"};
    group.muon = {.lr = 0.1, .weight_decay = 0.1, .momentum = 0.9};
    group.adamw = {.lr = 0.1, .weight_decay = 0.01};
    spec_.groups = {group};
    spec_.parameters = {
        {.name = "w", .shape = Dims{kRows, kCols}, .group = "all", .role = Role::kHidden},
        {.name = "b", .shape = Dims{kBias}, .group = "all", .role = Role::kBias}};
    routing_ = *RouteParameters(spec_);
    engine_ = *Engine::Create(*backend_, spec_, routing_, WholeRun(routing_), 0, {});
    for (int state = 0; state < 2; ++state) {
      weights_[state] = Random(state);
      EXPECT_TRUE(engine_
                      ->WriteInitial(state, WholeBox(*spec_.parameters[state].shape),
                                     Staged(weights_[state])->data(), Dtype::kF32)
                      .ok());
      momenta_[state] = Tensor(weights_[state].size());
    }
    EXPECT_TRUE(engine_->FinishInitial().ok());
  }

  Tensor Random(int state) {
    Tensor values(state == 0 ? kRows * kCols : kBias);
    for (float& value : values) value = normal_(generator_);
    return values;
  }
  std::shared_ptr<StagingBuffer> Staged(const Tensor& values) {
    auto memory = *engine_->AllocateStaging(values.size(), Dtype::kF32);
    std::memcpy(memory->data(), values.data(), values.size() * sizeof(float));
    return memory;
  }

  // One step; keeps what was before and after it, and a plain momentum beside the engine's.
  CommitDiagnostics Step(const std::vector<Tensor>& gradients, bool sample) {
    std::set<int> absent;
    for (int state = 0; state < 2; ++state) {
      if (gradients[state].empty()) {
        absent.insert(state);
        continue;
      }
      const std::vector<ReduceRequest> request = {
          {state, {{Staged(gradients[state]), Dtype::kF32}}, 1}};
      EXPECT_TRUE(engine_->Reduce(request).ok());
      old_weights_[state] = weights_[state];
      old_momenta_[state] = momenta_[state];
      for (std::size_t i = 0; i < momenta_[state].size(); ++i) {
        momenta_[state][i] += .1f * (gradients[state][i] - momenta_[state][i]);  // both betas .9
      }
    }
    const auto report = engine_->Commit({.absent = absent,
                                         .muon = {{"all", spec_.groups[0].muon}},
                                         .adamw = {{"all", spec_.groups[0].adamw}},
                                         .sample = sample});
    EXPECT_TRUE(report.ok()) << report.status();
    for (int state = 0; state < 2; ++state) {
      EXPECT_TRUE(engine_
                      ->Read(state, WholeBox(*spec_.parameters[state].shape), 0,
                             weights_[state].size(), Dtype::kF32, weights_[state].data())
                      .ok());
    }
    return report->diagnostics;
  }

  double Cosine(int state, const Tensor& gradient) const {
    const Tensor& m = old_momenta_[state];
    return Dot(m, gradient) / Norm(m) / Norm(gradient);
  }

  std::unique_ptr<kernels::Backend> backend_;
  RunSpec spec_;
  Routing routing_;
  std::unique_ptr<Engine> engine_;
  std::mt19937 generator_{7};
  std::normal_distribution<float> normal_;
  Tensor weights_[2], old_weights_[2], momenta_[2], old_momenta_[2];
};
INSTANTIATE_TEST_SUITE_P(Backends, CommitDiagnosticsTest,
                         ::testing::Values(Kind::kReference, Kind::kDevice, Kind::kCpu),
                         [](const auto& info) {
                           return info.param == Kind::kReference ? "Reference"
                                  : info.param == Kind::kDevice  ? "Device"
                                                                 : "Cpu";
                         });

TEST_P(CommitDiagnosticsTest, AgreesWithPlainLoops) {
  Tensor gradient = Random(0);
  EXPECT_THAT(Step({gradient, Random(1)}, false).groups["all"].cosines, IsEmpty())
      << "there is no momentum before the first step";
  for (int step = 0; step < 3; ++step) {
    // Correlated with the step before, so that the cosine is not just noise.
    const Tensor fresh = Random(0);
    for (std::size_t i = 0; i < fresh.size(); ++i) gradient[i] = .7f * gradient[i] + fresh[i];
    const Tensor bias = Random(1);
    CommitDiagnostics found = Step({gradient, bias}, true);
    const CommitDiagnostics::Group& group = found.groups["all"];
    // AdamW first.
    EXPECT_THAT(group.cosines, ElementsAre(DoubleNear(Cosine(1, bias), 1e-4),
                                           DoubleNear(Cosine(0, gradient), 1e-4)));
    const double factor = ShapeFactorOf(spec_.groups[0].shape_factor, spec_.groups[0].extra_factor,
                                        kRows, kCols);
    Tensor o = Difference(weights_[0], old_weights_[0], 1 - .1 * .1);
    const double muon_ratio = Norm(o) / Norm(old_weights_[0]);
    for (float& value : o) value = static_cast<float>(value / (-.1 * factor));
    const double adamw_ratio =
        Norm(Difference(weights_[1], old_weights_[1], 1 - .1 * .01)) / Norm(old_weights_[1]);
    EXPECT_THAT(group.update_ratios, ElementsAre(DoubleNear(adamw_ratio, 1e-4 * adamw_ratio),
                                                 DoubleNear(muon_ratio, 1e-4 * muon_ratio)));
    const double residual = PlainResidual(o, kRows, kCols);
    EXPECT_GT(residual, .2);
    EXPECT_THAT(group.residuals, ElementsAre(DoubleNear(residual, 1e-3)));
    ASSERT_EQ(found.residuals.size(), 1u);
    EXPECT_EQ(found.residuals[0].parameter, 0);
    ASSERT_EQ(found.gradient_norms.size(), 2u);
    EXPECT_EQ(found.gradient_norms[0].parameter, 0) << "the matrix has more elements";
    EXPECT_NEAR(found.gradient_norms[0].value, Norm(gradient), 1e-3);
  }
}

TEST_P(CommitDiagnosticsTest, ComputesNothingThatCostsProductsUnlessAskedTo) {
  CommitDiagnostics found = Step({Random(0), Random(1)}, false);
  EXPECT_FALSE(found.sampled);
  EXPECT_THAT(found.groups["all"].residuals, IsEmpty());
  EXPECT_EQ(found.groups["all"].update_ratios.size(), 1u) << "Muon's alone: it costs nothing";
}

TEST_P(CommitDiagnosticsTest, SamplingChangesNoBitOfTheStep) {
  const std::vector<Tensor> gradients = {Random(0), Random(1)};
  Step(gradients, true);
  const Tensor sampled[2] = {weights_[0], weights_[1]};
  ASSERT_TRUE(engine_->Reset().ok());
  for (int state = 0; state < 2; ++state) {
    ASSERT_TRUE(engine_
                    ->WriteInitial(state, WholeBox(*spec_.parameters[state].shape),
                                   Staged(old_weights_[state])->data(), Dtype::kF32)
                    .ok());
  }
  ASSERT_TRUE(engine_->FinishInitial().ok());
  Step(gradients, false);
  EXPECT_EQ(weights_[0], sampled[0]);
  EXPECT_EQ(weights_[1], sampled[1]);
}

// A rank-one gradient has one live direction of 24: the residual says it, and so does the norm.
TEST_P(CommitDiagnosticsTest, FindsLowRank) {
  Tensor gradient(kRows * kCols, 1.0f);
  CommitDiagnostics found = Step({gradient, Random(1)}, true);
  ASSERT_EQ(found.residuals.size(), 1u);
  EXPECT_NEAR(found.residuals[0].value, std::sqrt(23.0 / 24), .02);
  ASSERT_TRUE(engine_->Reduce(std::vector<ReduceRequest>{
                                  {0, {{Staged(gradient), Dtype::kF32}}, 1}})
                  .ok());
  const auto report = engine_->Commit({.absent = {1},
                                       .muon = {{"all", spec_.groups[0].muon}},
                                       .adamw = {{"all", spec_.groups[0].adamw}}});
  EXPECT_EQ(report->groups.at("all").ns_low_rank, 1) << "without a sample";
}

// B of a mixture of experts: a tensor that no token reaches keeps its momentum for ever.
TEST_P(CommitDiagnosticsTest, CountsTensorsWithoutAGradientForAHundredSteps) {
  Step({Random(0), Random(1)}, false);
  CommitDiagnostics found;
  for (int step = 0; step < kStaleSteps - 1; ++step) found = Step({{}, Random(1)}, false);
  EXPECT_EQ(found.stale, 0);
  EXPECT_EQ(Step({Tensor(kRows * kCols), Random(1)}, false).stale, 1) << "zeros are none, either";
  EXPECT_EQ(Step({Random(0), Random(1)}, false).stale, 0);
}

// A device that has no memory left for the sample's own products must not lose the step by it.
TEST(SampledCommit, IsAppliedWhereTheSampleCanNotBeTaken) {
  RunSpec spec{.name = "run", .groups = {{.name = "all"}}};
  spec.parameters = {{.name = "w", .shape = Dims{8, 8}, .group = "all", .role = Role::kHidden}};
  const Routing routing = *RouteParameters(spec);
  const Tensor ones(64, 1.0f);
  std::vector<Tensor> after;
  for (const bool refuses : {false, true}) {
    // The sample's rule takes any size for plausible.
    const auto backend = testing::MakeDeviceLikeBackend(
        kernels::MakeReferenceBackend(),
        {.refuses = [=](const auto& rule) { return refuses && rule.residual_max > 1e20; }});
    const auto engine = *Engine::Create(*backend, spec, routing, WholeRun(routing), 0, {});
    const auto staged = [&] {
      auto memory = *engine->AllocateStaging(64, Dtype::kF32);
      std::memcpy(memory->data(), ones.data(), 64 * sizeof(float));
      return memory;
    };
    ASSERT_TRUE(engine->WriteInitial(0, WholeBox({8, 8}), staged()->data(), Dtype::kF32).ok());
    ASSERT_TRUE(engine->FinishInitial().ok());
    const std::vector<ReduceRequest> request = {{0, {{staged(), Dtype::kF32}}, 1}};
    ASSERT_TRUE(engine->Reduce(request).ok());
    const auto report = engine->Commit({.muon = {{"all", spec.groups[0].muon}},
                                        .adamw = {{"all", spec.groups[0].adamw}},
                                        .sample = true});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->diagnostics.left_out.empty(), !refuses) << report->diagnostics.left_out;
    after.emplace_back(64);
    ASSERT_TRUE(
        engine->Read(0, WholeBox({8, 8}), 0, 64, Dtype::kF32, after.back().data()).ok());
  }
  EXPECT_EQ(after[0], after[1]);
  EXPECT_NE(after[0], ones);
}

TEST(MomentumCosine, IsEmptyWhereNothingCanBeTold) {
  const double inf = std::numeric_limits<double>::infinity();
  const MomentumSums right{.a = .9, .b = .1, .before = 4, .gradient = 9, .after = .81 * 4 + .09};
  EXPECT_NEAR(*MomentumCosine(right), 0, 1e-12);
  for (const MomentumSums& sums :
       {MomentumSums{.a = .9, .b = .1, .gradient = 1, .after = .01},             // no momentum
        MomentumSums{.a = .9, .b = .1, .before = 1, .after = .81},               // no gradient
        MomentumSums{.a = 0, .b = 1, .before = 1, .gradient = 1, .after = 1},    // no memory
        MomentumSums{.a = .9, .b = .1, .before = 1, .gradient = 1e-14, .after = .81},  // rounding
        MomentumSums{.a = .9, .b = .1, .before = inf, .gradient = 1, .after = inf}}) {
    EXPECT_FALSE(MomentumCosine(sums).has_value()) << sums.before << " " << sums.gradient;
  }
}

TEST(RemarkableList, KeepsTheLargestOfEachParameterDescending) {
  RemarkableList list;
  for (int i = 0; i < 20; ++i) Enter(list, (i * 7) % 20, i % 10);
  Enter(list, std::numeric_limits<double>::quiet_NaN(), 3);
  ASSERT_EQ(list.size(), kRemarkableMax);
  for (std::size_t i = 1; i < list.size(); ++i) {
    EXPECT_GT(list[i - 1].value, list[i].value);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(list[i].parameter, list[j].parameter);
  }
  EXPECT_EQ(list[0].value, 19);
}

}  // namespace
}  // namespace muond
