#include "proto/convert.h"

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

v1::Run SmallRun() {
  return Parse<v1::Run>(R"(
    name: "r" world_size: 1 groups { name: "g" }
    parameters { name: "w" shape { dims: [4, 3] } dtype: DTYPE_F32 group: "g" })");
}

// Expects that FromProto refuses what `change` makes of a good message and says `says`.
template <typename Message>
void ExpectRefused(Message message, const std::function<void(Message*)>& change,
                   const std::string& says) {
  ASSERT_TRUE(FromProto(message).ok()) << FromProto(message).status();
  change(&message);
  const auto status = FromProto(message).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << says << ": " << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(says));
}

void ExpectRunRefused(const std::function<void(v1::Run*)>& change, const std::string& says) {
  ExpectRefused<v1::Run>(SmallRun(), change, says);
}

TEST(Convert, MissingFieldsMeanTheDefaultsOfTheComments) {
  const auto run = FromProto(SmallRun());
  ASSERT_TRUE(run.ok()) << run.status();
  RunSpec expected;
  expected.name = "r";
  expected.groups.emplace_back().name = "g";
  ParameterSpec& w = expected.parameters.emplace_back();
  w.name = "w";
  w.shape = Dims{4, 3};
  w.group = "g";
  EXPECT_EQ(*run, expected);
  // Once more in numbers: values.h and the comments of types.proto are two places.
  const GroupSpec& group = run->groups[0];
  EXPECT_EQ(group.muon, (Hyperparameters{1e-3, 0.1, 0.95, 0.9, 0.999, 1e-8}));
  EXPECT_EQ(group.adamw, (Hyperparameters{1e-3, 0.01, 0.95, 0.9, 0.999, 1e-8}));
  EXPECT_TRUE(group.nesterov);
  EXPECT_EQ(group.coefficients, "simple");
  EXPECT_EQ(group.ns_method, "auto");
  EXPECT_EQ(group.extra_factor, 1);
  EXPECT_EQ(run->loss_scale.initial, 65536);
  EXPECT_EQ(run->loss_scale.growth_factor, 2);
  EXPECT_EQ(run->loss_scale.backoff_factor, 0.5);
  EXPECT_EQ(run->reduce_ranks, Reduction::kMean);
  EXPECT_EQ(run->reduce_micro_batches, Reduction::kSum);
  EXPECT_EQ(run->parameters[0].split.groups, 1);
}

TEST(Convert, PresentHyperparametersWithZerosMeanZeros) {
  auto message = SmallRun();
  message.mutable_groups(0)->mutable_muon();
  message.mutable_groups(0)->mutable_adamw()->set_eps(1e-6);
  const auto run = FromProto(message);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->groups[0].muon.lr, 0);
  EXPECT_EQ(run->groups[0].muon.weight_decay, 0);
  EXPECT_EQ(run->groups[0].muon.momentum, 0);
  EXPECT_EQ(run->groups[0].adamw.beta1, 0);
  EXPECT_EQ(run->groups[0].adamw.beta2, 0);
  EXPECT_EQ(run->groups[0].adamw.eps, 1e-6);
}

TEST(Convert, MomentumIsFp32UnlessBf16IsAskedFor) {
  auto message = SmallRun();
  EXPECT_EQ(FromProto(message)->groups[0].momentum_dtype, Dtype::kF32);
  message.mutable_groups(0)->set_momentum_dtype(v1::DTYPE_F32);
  EXPECT_EQ(FromProto(message)->groups[0].momentum_dtype, Dtype::kF32);
  message.mutable_groups(0)->set_momentum_dtype(v1::DTYPE_BF16);
  EXPECT_EQ(FromProto(message)->groups[0].momentum_dtype, Dtype::kBF16);
}

TEST(Convert, EachAlgorithmReadsItsOwnHyperparametersOnly) {
  auto message = SmallRun();
  message.mutable_groups(0)->mutable_muon()->set_beta1(17);     // AdamW's
  message.mutable_groups(0)->mutable_muon()->set_eps(-1);       // AdamW's
  message.mutable_groups(0)->mutable_adamw()->set_momentum(5);  // Muon's
  message.mutable_groups(0)->mutable_adamw()->set_eps(1e-8);
  const auto run = FromProto(message);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->groups[0].muon.beta1, 0.9);
  EXPECT_EQ(run->groups[0].muon.eps, 1e-8);
  EXPECT_EQ(run->groups[0].adamw.momentum, 0.95);
}

TEST(Convert, AMissingShapeIsNoScalar) {
  auto message = SmallRun();
  message.mutable_parameters(0)->clear_shape();
  EXPECT_FALSE(FromProto(message)->parameters[0].shape.has_value());
  message.mutable_parameters(0)->mutable_shape();
  EXPECT_EQ(FromProto(message)->parameters[0].shape, Dims{});
}

TEST(Convert, RefusesBadParameters) {
  const auto refused = [](const std::function<void(v1::Parameter*)>& change, const char* says) {
    ExpectRunRefused([&](v1::Run* run) { change(run->mutable_parameters(0)); }, says);
  };
  refused([](auto* p) { p->set_name("a\"b"); }, "parameter name");
  refused([](auto* p) { p->clear_name(); }, "parameter name");
  refused([](auto* p) { p->mutable_shape()->add_dims(-1); }, "parameter \"w\": shape [4, 3, -1]");
  refused([](auto* p) { p->mutable_shape()->add_dims(INT64_MAX); }, "parameter \"w\": shape");
  refused(
      [](auto* p) {
        for (int i = 0; i < 7; ++i) p->mutable_shape()->add_dims(1);
      },
      "rank 9");
  refused([](auto* p) { p->clear_dtype(); }, "parameter \"w\": dtype: missing");
  refused([](auto* p) { p->set_dtype(static_cast<v1::Dtype>(9)); }, "dtype: unknown value 9");
  refused([](auto* p) { p->set_kind(static_cast<v1::Kind>(17)); }, "kind: unknown value 17");
  refused([](auto* p) { p->set_role(static_cast<v1::Role>(-1)); }, "role: unknown value -1");
  refused([](auto* p) { p->clear_group(); }, "parameter \"w\": group name");
  refused([](auto* p) { p->set_tie("\n"); }, "tie");
  refused([](auto* p) { p->set_tie_reduction(static_cast<v1::Parameter::TieReduction>(2)); },
          "tie_reduction: unknown value 2");
  refused([](auto* p) { p->mutable_split()->add_sizes(0); }, "split");
  refused([](auto* p) { p->mutable_split()->set_groups(-2); }, "groups: expected >= 0, got -2");
}

TEST(Convert, RefusesBadGroups) {
  const auto refused = [](const std::function<void(v1::Group*)>& change, const char* says) {
    ExpectRunRefused([&](v1::Run* run) { change(run->mutable_groups(0)); }, says);
  };
  refused([](auto* g) { g->set_name("no spaces"); }, "group name \"no spaces\"");
  refused([](auto* g) { g->set_algorithm(static_cast<v1::Algorithm>(3)); },
          "group \"g\": algorithm: unknown value 3");
  refused([](auto* g) { g->mutable_adamw(); }, "group \"g\": eps: expected a finite number > 0");
  refused([](auto* g) { g->mutable_muon()->set_lr(kNan); },
          "lr: expected a number from 0 to 1e30, got nan (of muon)");
  refused([](auto* g) { g->mutable_muon()->set_momentum(1); }, "momentum");
  refused([](auto* g) { g->set_momentum_dtype(v1::DTYPE_F16); },
          "group \"g\": momentum_dtype: expected F32 or BF16, got F16");
  refused([](auto* g) { g->set_momentum_dtype(static_cast<v1::Dtype>(9)); },
          "group \"g\": momentum_dtype: expected F32 or BF16, got 9");
  refused(
      [](auto* g) {
        g->set_algorithm(v1::ALGORITHM_ADAMW);
        g->set_momentum_dtype(v1::DTYPE_BF16);
      },
      "group \"g\": momentum_dtype: BF16 is Muon's");
  refused([](auto* g) { g->set_norm_floor(kInf); },
          "norm_floor: expected a finite number >= 0, got inf");
  refused([](auto* g) { g->set_extra_factor(-1); }, "extra_factor");
  refused([](auto* g) { g->set_ns_steps(-1); }, "ns_steps");
  refused([](auto* g) { g->set_ns_method("fast"); }, "ns_method");
  refused([](auto* g) { g->set_shape_factor(static_cast<v1::Group::ShapeFactor>(8)); },
          "shape_factor: unknown value 8");
  refused([](auto* g) { g->set_weight_decay_form(static_cast<v1::Group::WeightDecayForm>(8)); },
          "weight_decay_form: unknown value 8");
}

TEST(Convert, CustomStepsComeInThreesAndOnlyAsCustom) {
  const auto refused = [](const std::string& coefficients, std::vector<double> steps,
                          const char* says) {
    ExpectRunRefused(
        [&](v1::Run* run) {
          run->mutable_groups(0)->set_coefficients(coefficients);
          run->mutable_groups(0)->mutable_custom_steps()->Add(steps.begin(), steps.end());
        },
        says);
  };
  refused("custom", {}, "coefficients \"custom\" conflicts with 0 custom_steps");
  refused("simple", {3, -4, 2}, "coefficients \"simple\" conflicts with 3 custom_steps");
  refused("custom", {3, -4}, "a, b, c");
  refused("custom", {3, -4, kNan}, "finite");
  refused("custom", std::vector<double>(3 * 65, 1.0), "at most 64 steps");
  auto message = SmallRun();
  message.mutable_groups(0)->set_coefficients("custom");
  for (const double c : {2.0, -1.5, 0.5}) message.mutable_groups(0)->add_custom_steps(c);
  EXPECT_EQ(FromProto(message)->groups[0].custom_steps, (std::vector<double>{2, -1.5, 0.5}));
}

TEST(Convert, RefusesBadRuns) {
  ExpectRunRefused([](auto* r) { r->set_name("a/b"); }, "run name \"a/b\"");
  ExpectRunRefused([](auto* r) { r->set_world_size(0); }, "world_size");
  ExpectRunRefused([](auto* r) { r->set_max_grad_norm(kNan); }, "run \"r\": max_grad_norm");
  ExpectRunRefused([](auto* r) { r->set_grad_norm_skip_threshold(-1); },
                   "grad_norm_skip_threshold");
  ExpectRunRefused([](auto* r) { r->set_clip_policy(static_cast<v1::Run::ClipPolicy>(2)); },
                   "clip_policy: unknown value 2");
  ExpectRunRefused([](auto* r) { r->set_reduce_ranks(static_cast<v1::Run::Reduction>(3)); },
                   "reduce_ranks: unknown value 3");
  ExpectRunRefused([](auto* r) { r->add_rules(); }, "routing rule: pattern");
  ExpectRunRefused([](auto* r) { r->add_rules()->set_pattern(std::string(1025, 'a')); },
                   "1 to 1024 bytes, got 1025");
}

// B-041: a refusal names both of the options that don't go together.
TEST(Convert, MegatronLm2164_ConflictingOptionsAreBothNamed) {
  ExpectRunRefused(
      [](auto* r) {
        r->mutable_loss_scale()->set_mode(v1::LossScale::MODE_DYNAMIC);
        r->mutable_loss_scale()->set_minimum(8);
        r->mutable_loss_scale()->set_initial(4);
      },
      "loss_scale: minimum 8 conflicts with initial 4");
}

TEST(Convert, RefusesBadLossScales) {
  const auto refused = [](const std::function<void(v1::LossScale*)>& change, const char* says) {
    ExpectRunRefused([&](v1::Run* run) { change(run->mutable_loss_scale()); },
                     std::string("run \"r\": loss_scale: ") + says);
  };
  refused([](auto* s) { s->set_mode(static_cast<v1::LossScale::Mode>(4)); },
          "mode: unknown value 4");
  refused([](auto* s) { s->set_policy(static_cast<v1::LossScale::Policy>(3)); },
          "policy: unknown value 3");
  refused([](auto* s) { s->set_initial(-1); }, "initial");
  refused([](auto* s) { s->set_initial(kInf); }, "initial");
  refused([](auto* s) { s->set_growth_factor(1); }, "growth_factor");
  refused([](auto* s) { s->set_backoff_factor(1); }, "backoff_factor");
  refused([](auto* s) { s->set_backoff_factor(kNan); }, "backoff_factor");
  refused([](auto* s) { s->set_window(-1); }, "window");
  refused([](auto* s) { s->set_hysteresis(-1); }, "hysteresis");
  refused([](auto* s) { s->set_minimum(-1); }, "minimum");
  refused([](auto* s) { s->set_error_after(-1); }, "error_after");
}

TEST(Convert, RefusesBadBoxes) {
  const auto box = Parse<v1::Box>("offset: [0, 0] size: [2, 3]");
  const auto refused = [&](const std::function<void(v1::Box*)>& change, const char* says) {
    ExpectRefused<v1::Box>(box, change, says);
  };
  refused([](auto* b) { b->add_size(1); }, "2 offsets, but 3 sizes");
  refused([](auto* b) { b->set_flat(true); }, "a flat range has one offset");
  refused([](auto* b) { b->set_offset(1, -4); }, "offsets >= 0, got -4");
  refused([](auto* b) { b->set_size(1, -4); }, "negative");
  refused([](auto* b) { b->set_size(1, INT64_MAX); }, "sizes");
}

TEST(Convert, SlicesNameEachParameterOnce) {
  google::protobuf::RepeatedPtrField<v1::ParameterSlices> message;
  *message.Add() =
      Parse<v1::ParameterSlices>("parameter: 'a' boxes { offset: 0 size: 4 flat: true }");
  *message.Add() = Parse<v1::ParameterSlices>("parameter: 'b'");
  const auto slices = SlicesFromProto(message);
  ASSERT_TRUE(slices.ok()) << slices.status();
  EXPECT_EQ(*slices, (RankSlices{{"a", {Box{{0}, {4}, true}}}, {"b", {}}}));
  google::protobuf::RepeatedPtrField<v1::ParameterSlices> back;
  SlicesToProto(*slices, &back);
  EXPECT_EQ(*SlicesFromProto(back), *slices);

  *message.Add() = message[0];
  EXPECT_THAT(std::string(SlicesFromProto(message).status().message()),
              HasSubstr("parameter \"a\": slices are listed twice"));
  message.RemoveLast();
  message[1].add_boxes()->add_size(1);
  EXPECT_THAT(std::string(SlicesFromProto(message).status().message()),
              HasSubstr("parameter \"b\": slice 0: box"));
}

TEST(Convert, BeginChecksItsNumbers) {
  EXPECT_EQ(*FromProto(v1::BeginRequest()), StepBegin{});
  const auto refused = [](const std::function<void(v1::BeginRequest*)>& change, const char* says) {
    ExpectRefused<v1::BeginRequest>({}, change, says);
  };
  refused([](auto* b) { b->set_step(-1); }, "step");
  refused([](auto* b) { b->set_loss_scale(kInf); }, "loss_scale");
  refused([](auto* b) { b->set_loss_scale(-1); }, "loss_scale");
  refused([](auto* b) { b->set_micro_batches(-1); }, "micro_batches");
  refused([](auto* b) { (*b->mutable_muon())["g"].set_lr(kNan); }, "group \"g\": lr");
  refused([](auto* b) { (*b->mutable_adamw())["g"].set_lr(1); }, "group \"g\": eps");
  refused([](auto* b) { (*b->mutable_muon())["a b"].set_lr(1); }, "group name");
}

// The enumerations are cast by number; here their names are held against each other.
TEST(Convert, EnumerationsMeanTheSameOnBothSides) {
  for (int i = 0; i <= v1::Kind_MAX; ++i) {
    EXPECT_EQ(absl::AsciiStrToLower(v1::Kind_Name(i)),
              "kind_" + std::string(KindName(static_cast<Kind>(i))));
  }
  for (int i = 0; i <= v1::Role_MAX; ++i) {
    EXPECT_EQ(absl::AsciiStrToLower(v1::Role_Name(i)),
              "role_" + std::string(RoleName(static_cast<Role>(i))));
  }
  for (int i = 0; i <= v1::Algorithm_MAX; ++i) {
    EXPECT_EQ(absl::AsciiStrToLower(v1::Algorithm_Name(i)),
              "algorithm_" + std::string(AlgorithmName(*FromProto(static_cast<v1::Algorithm>(i)))));
  }
  for (int i = 1; i <= v1::SkipCause_MAX; ++i) {
    EXPECT_EQ(
        absl::AsciiStrToLower(v1::SkipCause_Name(i)),
        "skip_cause_" + std::string(SkipCauseName(*FromProto(static_cast<v1::SkipCause>(i)))));
  }
  for (int i = 1; i <= v1::Dtype_MAX; ++i) {
    EXPECT_EQ(absl::AsciiStrToLower(v1::Dtype_Name(i)),
              "dtype_" + std::string(kernels::DtypeName(*FromProto(static_cast<v1::Dtype>(i)))));
  }
  EXPECT_EQ(FromProto(v1::SKIP_CAUSE_NONE).value(), SkipCause::kNone);
  EXPECT_FALSE(FromProto(static_cast<v1::SkipCause>(5)).ok());
}

}  // namespace
}  // namespace muond
