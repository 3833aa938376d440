// Random values to messages, to bytes, and back.
#include <cstdint>
#include <random>
#include <string>

#include "gtest/gtest.h"
#include "proto/convert.h"

namespace muond {
namespace {

class RandomValues {
 public:
  explicit RandomValues(unsigned seed) : random_(seed) {}

  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }
  bool Flag() { return Below(2) == 1; }
  double Unit() { return std::generate_canonical<double, 53>(random_); }  // [0, 1)
  template <typename Enum>
  Enum Any(Enum last) {
    return static_cast<Enum>(Below(static_cast<std::int64_t>(last) + 1));
  }

  ParameterSpec Parameter(int number) {
    ParameterSpec value;
    value.name = "p" + std::to_string(number);
    if (Below(8) > 0) {
      value.shape.emplace(Below(9));
      for (auto& dim : *value.shape) dim = Below(10);
    }
    value.allow_empty = Flag();
    value.dtype = Any(Dtype::kF16);
    value.group = "g" + std::to_string(Below(3));
    value.kind = Any(Kind::kScalar);
    value.role = Any(Role::kOther);
    value.exclude = Flag();
    value.replicated = Flag();
    value.tie = Flag() ? "tie/" + std::to_string(Below(3)) : "";
    value.tie_reduction = Any(TieReduction::kSame);
    for (std::int64_t i = Below(4); i > 0; --i) value.split.sizes.push_back(1 + Below(5));
    value.split.groups = 1 + Below(4);
    value.split.interleaved = Flag();
    value.split.per_head = Flag();
    return value;
  }

  GroupSpec Group(int number) {
    GroupSpec value;
    value.name = "g" + std::to_string(number);
    value.algorithm = Any(Algorithm::kAdamW);
    value.muon = Muon();
    value.adamw = AdamW();
    value.nesterov = Flag();
    value.momentum_sum_form = Flag();
    if (Flag()) {
      value.coefficients = "custom";
      for (std::int64_t i = 3 * (1 + Below(4)); i > 0; --i)
        value.custom_steps.push_back(Unit() - 0.5);
    }
    value.ns_steps = Below(11);
    value.ns_method = Flag() ? "gram" : "standard";
    value.norm_floor = Unit();
    value.shape_factor = Any(ShapeFactor::kNone);
    value.extra_factor = Unit() + 0.1;
    value.weight_decay_form = Any(WeightDecayForm::kIndependent);
    const bool adamw = value.algorithm == Algorithm::kAdamW;
    value.momentum_dtype = Flag() && !adamw ? Dtype::kBF16 : Dtype::kF32;
    return value;
  }

  Hyperparameters Muon() {
    Hyperparameters value = GroupSpec{}.muon;
    value.lr = Unit();
    value.weight_decay = Unit();
    value.momentum = Unit();
    return value;
  }

  Hyperparameters AdamW() {
    Hyperparameters value = GroupSpec{}.adamw;
    value.lr = Unit();
    value.weight_decay = Unit();
    value.beta1 = Unit();
    value.beta2 = Unit();
    value.eps = Unit() + 1e-9;
    return value;
  }

  RunSpec Run() {
    RunSpec value;
    value.name = "run" + std::to_string(Below(100));
    value.world_size = 1 + Below(100);
    for (std::int64_t i = Below(6); i > 0; --i) value.parameters.push_back(Parameter(i));
    for (std::int64_t i = Below(4); i > 0; --i) value.groups.push_back(Group(i));
    for (std::int64_t i = Below(4); i > 0; --i) {
      value.rules.push_back({"a.*" + std::to_string(i), Any(Algorithm::kAdamW)});
    }
    value.loss_scale = {Any(LossScaleMode::kExternal),
                        Any(LossScalePolicy::kMegatron),
                        1 + Unit(),
                        1.5 + Unit(),
                        0.1 + 0.5 * Unit(),
                        Below(3000),
                        Below(4),
                        Unit(),
                        Below(5)};
    value.max_grad_norm = Unit();
    value.clip_policy = Any(ClipPolicy::kAll);
    value.grad_norm_skip_threshold = Unit();
    value.reduce_ranks = Any(Reduction::kSum);
    value.reduce_micro_batches = Any(Reduction::kSum);
    return value;
  }

 private:
  std::mt19937 random_;
};

TEST(Convert, RunsSurviveARoundTripThroughBytes) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    const RunSpec value = RandomValues(seed).Run();
    v1::Run message;
    ASSERT_TRUE(message.ParseFromString(ToProto(value).SerializeAsString()));
    const auto back = FromProto(message);
    ASSERT_TRUE(back.ok()) << "seed " << seed << ": " << back.status();
    ASSERT_EQ(*back, value) << "seed " << seed << ": " << message.DebugString();
  }
}

TEST(Convert, BeginsSurviveARoundTrip) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    RandomValues random(seed);
    StepBegin value{random.Below(1000), random.Unit() + 0.1, 1 + random.Below(8), {}, {}};
    for (std::int64_t i = random.Below(4); i > 0; --i) {
      value.muon["g" + std::to_string(i)] = random.Muon();
      value.adamw["h" + std::to_string(i)] = random.AdamW();
    }
    v1::BeginRequest message;
    (*message.mutable_muon())["stale"];  // what the message held before is replaced
    ToProto(value, &message);
    const auto back = FromProto(message);
    ASSERT_TRUE(back.ok()) << back.status();
    ASSERT_EQ(*back, value) << message.DebugString();
  }
}

TEST(Convert, OutcomesSurviveARoundTrip) {
  const StepOutcome value{
      7,  false,     SkipCause::kNormThreshold, 2, 4, 1.5, 0.25, 8, 9, 10, 11, 12, 13, 14,
      15, {"a", "b"}};
  EXPECT_EQ(FromProto(ToProto(value)), value);
  EXPECT_EQ(FromProto(ToProto(StepOutcome{})), StepOutcome{});
  v1::StepOutcome from_the_future;
  from_the_future.set_cause(static_cast<v1::SkipCause>(99));
  EXPECT_EQ(FromProto(from_the_future).cause, SkipCause::kNone);
}

}  // namespace
}  // namespace muond
