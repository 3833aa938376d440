// Logical shapes decide what is orthogonalized: flat shards, splits, experts, convolutions, ties,
// empty tensors, narrow dtypes.
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

// W = 0, lr 1, no decay: the step shows -factor x O.
RunSpec Bare(std::vector<ParameterSpec> parameters, std::int64_t world_size = 1) {
  RunSpec spec = SpecOf(std::move(parameters), world_size);
  GroupOf(spec, "muon").muon = {.lr = 1, .weight_decay = 0};
  return spec;
}

Floats Negated(Floats values) {
  for (float& value : values) value = -value;
  return values;
}

TEST(Shapes, DeepSpeed8442_FlatShardsAreStillAMatrix) {
  const auto service = StartService();
  const Tensors zero = {{"w", Floats(16, 0)}}, gradient = {{"w", Noise(16, 3)}};
  RunSpec spec = Bare({Matrix("w", 4, 4)}, 2);
  TestRun sharded(*service, spec, {.cut = {Cut::kFlat}, .initial = zero});
  ASSERT_EQ(sharded.slices(0).at("w"), (std::vector<Box>{{{0}, {8}, true}}));
  EXPECT_EQ(sharded.session().routing().parameters(0).algorithm(), v1::ALGORITHM_MUON);
  EXPECT_EQ(sharded.Step(gradient).newton_schulz_calls, 1);
  spec = Bare({Matrix("w", 4, 4)});
  spec.name = "whole";
  TestRun whole(*service, spec, {.initial = zero});
  whole.Step(gradient);
  EXPECT_EQ(sharded.TensorDigest(), whole.TensorDigest());
  EXPECT_NE(whole.Weights().at("w"), Negated(gradient.at("w"))) << "that would be plain descent";
}

// Orthogonalizing the two halves apart would give row norms .72288, 1.11920, 1.10811, 1.10811.
TEST(Shapes, RowShardsAreNotOrthogonalizedApart) {
  const auto service = StartService();
  RunSpec spec = Bare({Matrix("w", 4, 2)}, 2);
  GroupOf(spec, "muon").shape_factor = ShapeFactor::kNone;
  TestRun run(*service, spec, {.cut = {Cut::kRows}, .initial = {{"w", Floats(8, 0)}}});
  run.Step({{"w", {3, 0, 0, 4, 1, 0, 0, 1}}});
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(1e-5f),
                        Negated({.7189925f, 0, 0, 1.0745257f, .2396642f, 0, 0, .2686314f})));
}

TEST(Shapes, Megatron7117_ASplitIsDecidedOnTheLogicalShape) {
  const auto service = StartService();
  ParameterSpec qkv = Matrix("qkv", 4, 2);
  qkv.split.sizes = {2, 1, 1};
  TestRun run(*service, Bare({qkv}, 4), {.cut = {Cut::kRows}, .initial = {{"qkv", Floats(8, 0)}}});
  EXPECT_EQ(run.Step({{"qkv", {3, 0, 0, 4, 0, 1, 1, 0}}}).newton_schulz_calls, 3);
  EXPECT_THAT(run.Weights().at("qkv"),
              Pointwise(FloatNear(1e-5f),
                        Negated({.7228761f, 0, 0, 1.1192039f, 0, .696437f, .696437f, 0})));
}

TEST(Shapes, Megatron4731_InterleavedGroupsGatherTheirRows) {
  const auto service = StartService();
  ParameterSpec qkv = Matrix("qkv", 4, 2);
  qkv.split = {.sizes = {1, 1}, .groups = 2, .interleaved = true};
  TestRun run(*service, Bare({qkv}), {.initial = {{"qkv", Floats(8, 0)}}});
  // Rows q0 k0 q1 k1: q is [[3,0],[0,4]], k is [[0,1],[0,1]].
  EXPECT_EQ(run.Step({{"qkv", {3, 0, 0, 1, 0, 4, 0, 1}}}).newton_schulz_calls, 2);
  const float k = .696437f / std::sqrt(2.0f);
  EXPECT_THAT(run.Weights().at("qkv"),
              Pointwise(FloatNear(1e-5f), Negated({.7228761f, 0, 0, k, 0, 1.1192039f, 0, k})));
}

TEST(Shapes, Pytorch180561_ExpertsAreABatchOfMatrices) {
  const auto service = StartService();
  ParameterSpec experts = Matrix("experts", 2, 2);
  experts.shape = Dims{2, 2, 2};
  experts.kind = Kind::kExperts;
  TestRun run(*service, Bare({experts}), {.initial = {{"experts", Floats(8, 0)}}});
  EXPECT_EQ(run.Status().muon_matrices(), 2);
  EXPECT_EQ(run.Step({{"experts", {3, 0, 0, 4, 1, 0, 0, 1}}}).newton_schulz_calls, 2);
  EXPECT_THAT(run.Weights().at("experts"),
              Pointwise(FloatNear(1e-5f),
                        Negated({.7228761f, 0, 0, 1.1192039f, 1.1081112f, 0, 0, 1.1081112f})));
}

// The factor comes from the views 64 x 36 and 64 x 96, never from the kernels height and width.
TEST(Shapes, KellerJordan63_AConvolutionsFactorIsThatOfItsView) {
  const auto service = StartService();
  const auto scale_of = [&](const std::string& name, Dims shape, ShapeFactor factor) {
    ParameterSpec conv = Matrix("conv", 1, 1);
    conv.shape = std::move(shape);
    conv.kind = Kind::kConv;
    const std::int64_t elements = Must(ElementCount(*conv.shape));
    RunSpec spec = Bare({conv});
    spec.name = name;
    GroupOf(spec, "muon").shape_factor = factor;
    TestRun run(*service, spec, {.initial = {{"conv", Floats(elements, 0)}}});
    run.Step({{"conv", Noise(elements, 5)}});
    return run.Describe("conv").weight_norm();
  };
  const auto factor_of = [&](const std::string& name, const Dims& shape) {
    return scale_of(name, shape, ShapeFactor::kOriginal) /
           scale_of(name + "-none", shape, ShapeFactor::kNone);
  };
  EXPECT_NEAR(factor_of("tall", {64, 4, 3, 3}), std::sqrt(64.0 / 36.0), 1e-6);
  EXPECT_NEAR(factor_of("wide", {64, 32, 3, 1}), 1, 1e-6);
}

TEST(Shapes, Moonlight40_TheShapeFactorEntersOnceAndNotTheDecay) {
  const auto service = StartService();
  TestRun run(*service, SpecOf({Matrix("w", 4, 1)}), {.initial = {{"w", Floats(4, 1)}}});
  run.Step({{"w", Floats(4, 0)}});
  EXPECT_EQ(run.Weights().at("w"), Floats(4, .99f));
  run.Step({{"w", {1, 0, 0, 0}}});
  const float kept = .99f * .99f;
  EXPECT_THAT(run.Weights().at("w"),
              Pointwise(FloatNear(1e-6f), Floats{kept - .1f * 2 * .696437f, kept, kept, kept}));
}

TEST(Shapes, DeepSpeed195_TiedNamesShareOneState) {
  const auto service = StartService();
  for (const TieReduction reduction : {TieReduction::kSum, TieReduction::kSame}) {
    const bool sum = reduction == TieReduction::kSum;
    std::vector<ParameterSpec> names = {Matrix("in", 2, 2), Matrix("out", 2, 2)};
    for (ParameterSpec& name : names) {
      name.tie = "shared";
      name.tie_reduction = reduction;
    }
    RunSpec spec = SpecOf(names);
    spec.name = sum ? "sum" : "same";
    TestRun run(*service, spec, {.initial = {{"in", {1, 0, 0, 1}}}});
    EXPECT_EQ(run.Status().elements(), 4);
    EXPECT_EQ(run.Status().muon_parameters(), 1);
    const StepOutcome outcome = sum ? run.Step({{"in", {1, 0, 0, 4}}, {"out", {2, 0, 0, 0}}})
                                    : run.Step({{"in", {3, 0, 0, 4}}});
    EXPECT_EQ(outcome.newton_schulz_calls, 1);
    EXPECT_NEAR(outcome.grad_norm, 5, 1e-9) << "counted once";
    EXPECT_THAT(run.Weights().at("in"),
                Pointwise(FloatNear(1e-6f), Floats{.9177124f, 0, 0, .8780796f}));
    if (sum) {
      EXPECT_EQ(run.Weights().at("out"), run.Weights().at("in"));
    }
    EXPECT_EQ(run.Digest(true).parameters_size(), 1);
  }
}

TEST(Shapes, TransformerEngine3207_AnEmptyTensorStopsNobodyElse) {
  const auto service = StartService();
  ParameterSpec empty = Vector("empty", 0);
  empty.allow_empty = true;
  for (const bool last : {true, false}) {
    std::vector<ParameterSpec> parameters = {empty, Matrix("w", 2, 2), Vector("p", 1)};
    if (last) std::swap(parameters[0], parameters[2]);
    RunSpec spec = SpecOf(parameters);
    spec.name = last ? "last" : "first";
    TestRun run(*service, spec, {.initial = {{"w", {1, 0, 0, 1}}, {"p", {1}}}});
    EXPECT_TRUE(run.Step({{"w", {3, 0, 0, 4}}, {"p", {2}}}).applied);
    EXPECT_THAT(run.Weights().at("w"),
                Pointwise(FloatNear(1e-6f), Floats{.9177124f, 0, 0, .8780796f}));
    EXPECT_NEAR(run.Weights().at("p")[0], .899, 1e-6);
  }
}

// Each step is below half a bf16 ulp: without fp32 masters nothing would ever move.
TEST(Shapes, Ao1124_Bf16ParametersMoveByTheirFp32Masters) {
  const auto service = StartService();
  ParameterSpec narrow = Vector("p", 8);
  narrow.dtype = Dtype::kBF16;
  RunSpec spec = SpecOf({narrow});
  GroupOf(spec, "adamw").adamw = {.lr = 1e-4, .weight_decay = 0};
  TestRun run(*service, spec, {.initial = {{"p", Floats(8, 1)}}});
  for (int step = 0; step < 100; ++step) run.Step({{"p", Floats(8, 1)}});
  EXPECT_THAT(run.Weights().at("p"), Pointwise(FloatNear(2e-6f), Floats(8, .99f)));
  EXPECT_EQ(run.Pulled().at("p"), Floats(8, .98828125f));
}

// All pairs of wire dtypes: what is sent narrow is widened exactly, what is pulled is rounded once.
TEST(Shapes, EveryPairOfDtypesGivesTheSameMasters) {
  const auto service = StartService();
  std::string expected;
  for (const Dtype parameter : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    for (const Dtype gradient : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
      RunSpec spec = SpecOf({Matrix("w", 3, 4), Vector("p", 5)});
      spec.name = std::string(kernels::DtypeName(parameter)) + "-" +
                  std::string(kernels::DtypeName(gradient));
      for (ParameterSpec& one : spec.parameters) one.dtype = parameter;
      TestRun run(*service, spec);
      // Values that all three types hold exactly.
      const Tensors values = {{"w", {1, -.5, .25, 2, 3, -4, 0, .125, 1.5, 1, 1, -2}},
                              {"p", {1, 2, -3, .5, 0}}};
      run.Step(StepInput{.gradients = {{values}}, .dtype = gradient});
      if (expected.empty()) expected = run.TensorDigest();
      EXPECT_EQ(run.TensorDigest(), expected) << spec.name;
      const Tensors weights = run.Weights(), pulled = run.Pulled();
      for (const auto& [name, masters] : weights) {
        for (std::size_t i = 0; i < masters.size(); ++i) {
          const float rounded = parameter == Dtype::kF32 ? masters[i]
                                : parameter == Dtype::kBF16
                                    ? kernels::BF16ToFloat(kernels::FloatToBF16(masters[i]))
                                    : kernels::F16ToFloat(kernels::FloatToF16(masters[i]));
          EXPECT_EQ(pulled.at(name)[i], rounded) << spec.name << " " << name << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace muond::cluster
