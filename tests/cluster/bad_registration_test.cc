// Runs, groups and sessions that can't be: refused by name and cause, without a trace and without
// harm to the run that is there.
#include <limits>
#include <string>
#include <vector>

#include "tests/cluster/bad_registration.h"

namespace muond::cluster {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const std::vector<Registration> kRunCases = {
    {"RunNameWithASlash",
     StatusCode::kInvalidArgument,
     {"run", "../new"},
     [](auto& request) { request.mutable_run()->set_name("../new"); }},
    {"NoRunName",
     StatusCode::kInvalidArgument,
     {"run"},
     [](auto& request) { request.mutable_run()->set_name(""); }},
    {"WorldOfZero",
     StatusCode::kInvalidArgument,
     {"run \"new\"", "world_size", "0"},
     [](auto& request) { request.mutable_run()->set_world_size(0); }},
    {"WorldOfABillion",
     StatusCode::kResourceExhausted,
     {"run \"new\"", "1000000000", "65536"},
     [](auto& request) { request.mutable_run()->set_world_size(1'000'000'000); }},
    {"RankOutsideTheWorld",
     StatusCode::kInvalidArgument,
     {"run \"new\": rank 1"},
     [](auto& request) { request.set_rank(1); }},
    {"NegativeRank",
     StatusCode::kInvalidArgument,
     {"run \"new\": rank -1"},
     [](auto& request) { request.set_rank(-1); }},
    {"SessionWithASpace",
     StatusCode::kInvalidArgument,
     {"session"},
     [](auto& request) { request.set_session("a b"); }},
    {"UnknownGroup",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "group \"typo\""},
     [](auto& request) { P(request).set_group("typo"); }},
    {"DuplicateGroup",
     StatusCode::kAlreadyExists,
     {"group \"muon\"", "twice"},
     [](auto& request) { *request.mutable_run()->add_groups() = Muon(request); }},
    {"VectorInAMuonGroup",
     StatusCode::kInvalidArgument,
     {"\"p\"", "no matrix view"},
     [](auto& request) { P(request).set_group("muon"); }},
    {"ExcludedInAMuonGroup",
     StatusCode::kInvalidArgument,
     {"parameter \"w\"", "exclude conflicts"},
     [](auto& request) { W(request).set_exclude(true); }},
    {"NanLr",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "lr", "nan"},
     [](auto& request) { Muon(request).mutable_muon()->set_lr(kNan); }},
    {"NegativeLr",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "lr", "-1"},
     [](auto& request) { Muon(request).mutable_muon()->set_lr(-1); }},
    {"MomentumOfOne",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "momentum"},
     [](auto& request) { Muon(request).mutable_muon()->set_momentum(1); }},
    {"MomentumInF16",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "momentum_dtype", "F16"},
     [](auto& request) { Muon(request).set_momentum_dtype(v1::DTYPE_F16); }},
    {"MomentumOfAdamWInBf16",
     StatusCode::kInvalidArgument,
     {"group \"adamw\"", "momentum_dtype"},
     [](auto& request) {
       request.mutable_run()->mutable_groups(0)->set_momentum_dtype(v1::DTYPE_BF16);
     }},
    {"NegativeNormFloor",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "norm_floor"},
     [](auto& request) { Muon(request).set_norm_floor(-1); }},
    {"UnknownShapeFactor",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "shape_factor"},
     [](auto& request) { Muon(request).set_shape_factor(static_cast<v1::Group::ShapeFactor>(9)); }},
    {"UnknownCoefficients",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "coefficients", "polar-typo", "simple"},
     Coefficients("polar-typo", 0)},
    {"EO_SixStepsOfAFiveStepSet",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "ns_steps", "\"quintic_yj\"", "5", "6"},
     Coefficients("quintic_yj", 6)},
    {"EO_FourStepsOfAFiveStepSet",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "ns_steps", "\"cubic5\""},
     Coefficients("cubic5", 4)},
    {"CustomWithoutSteps",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "custom"},
     Coefficients("custom", 0)},
    {"UnknownMethod",
     StatusCode::kInvalidArgument,
     {"group \"muon\"", "ns_method"},
     [](auto& request) { Muon(request).set_ns_method("magic"); }},
    {"NanMaxNorm",
     StatusCode::kInvalidArgument,
     {"run \"new\"", "max_grad_norm"},
     [](auto& request) { request.mutable_run()->set_max_grad_norm(kNan); }},
    {"NegativeThreshold",
     StatusCode::kInvalidArgument,
     {"run \"new\"", "grad_norm_skip_threshold"},
     [](auto& request) { request.mutable_run()->set_grad_norm_skip_threshold(-1); }},
    {"NegativeLossScale",
     StatusCode::kInvalidArgument,
     {"run \"new\"", "loss_scale", "initial"},
     [](auto& request) { request.mutable_run()->mutable_loss_scale()->set_initial(-1); }},
    {"LossScaleBeyondFp32",
     StatusCode::kInvalidArgument,
     {"run \"new\"", "loss", "1e+300"},
     [](auto& request) {
       request.mutable_run()->mutable_loss_scale()->set_mode(v1::LossScale::MODE_STATIC);
       request.mutable_run()->mutable_loss_scale()->set_initial(1e300);
     }},
    {"BadPattern",
     StatusCode::kInvalidArgument,
     {"routing rule \"w[\""},
     [](auto& request) { request.mutable_run()->add_rules()->set_pattern("w["); }},
    {"TorchTitan4813_ACatchAllIsNoExclusion",
     StatusCode::kFailedPrecondition,
     {"\"w13\"", "silently inactive"},
     [](auto& request) {
       v1::Group* automatic = request.mutable_run()->add_groups();
       automatic->set_name("auto");
       W(request).set_group("auto");
       W(request).set_name("w13");
       request.mutable_slices(1)->set_parameter("w13");
       for (const auto& [pattern, algorithm] :
            {std::pair("w[123]", v1::ALGORITHM_MUON), std::pair(".*", v1::ALGORITHM_ADAMW)}) {
         v1::RoutingRule* rule = request.mutable_run()->add_rules();
         rule->set_pattern(pattern);
         rule->set_algorithm(algorithm);
       }
       request.mutable_run()->mutable_groups()->DeleteSubrange(1, 1);
     }},
    {"OpenWithAnotherSpecification",
     StatusCode::kInvalidArgument,
     {"run \"run\"", "another specification", "max_grad_norm"},
     [](auto& request) {
       request.mutable_run()->set_name("run");
       request.mutable_run()->set_max_grad_norm(3);
     }},
    {"RankHeldByAnotherSession",
     StatusCode::kAlreadyExists,
     {"run \"run\": rank 0", "another session"},
     [](auto& request) {
       request.mutable_run()->set_name("run");
       request.set_session("stranger");
     }},
    {"RejoinWithOtherSlices",
     StatusCode::kAlreadyExists,
     {"run \"run\": rank 0", "other slices"},
     [](auto& request) {
       request.mutable_run()->set_name("run");
       Ranges({{0, 5}, {5, 12}})(request);
     }},
};

class BadRegistration : public ::testing::TestWithParam<Registration> {};

TEST_P(BadRegistration, IsRefusedByNameAndLeavesNoTrace) { ExpectRefused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Cases, BadRegistration, ::testing::ValuesIn(kRunCases), RegistrationName);

TEST(Registration, EO_EveryStepCountThatIsTheSetsOwnIsAccepted) {
  const auto service = StartService();
  for (const auto& [set, steps] : {std::pair("deepseek_v4", 10), std::pair("quintic_yj", 5)}) {
    RunSpec spec = Good();
    spec.name = set;
    GroupOf(spec, "muon").coefficients = set;
    GroupOf(spec, "muon").ns_steps = steps;
    EXPECT_TRUE(TestRun(*service, spec).Step(NoiseFor(spec, 1)).applied) << set;
  }
}

TEST(Registration, PushAndPullBeforeInitializeAreRefusedByName) {
  const auto service = StartService();
  RawTrainer trainer(*service, "new");
  Must(trainer.Register(trainer.RegisterRequestOf(Good(), CutOf(Good(), {}, 0))));
  v1::PullRequest pull;
  *pull.mutable_id() = trainer.id();
  for (const absl::Status& status :
       {trainer.Begin(0), trainer.Push(0, {ChunkOf("p", 0, 0, Bytes(Floats(12)))}).status(),
        trainer.Finish(0).status(), trainer.Pull(pull).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("initialize \"w\", \"p\" first"));
  }
  for (const float bad : {std::numeric_limits<float>::infinity(), static_cast<float>(kNan)}) {
    Floats values(12, 1);
    values[5] = bad;
    const absl::Status status = trainer.Initialize({ChunkOf("p", 0, 0, Bytes(values))}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("parameter \"p\": initial values"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("1 non-finite elements"));
  }
  EXPECT_TRUE(Must(trainer.Initialize({ChunkOf("p", 0, 0, Bytes(Floats(12))),
                                       ChunkOf("w", 0, 0, Bytes(Floats(16)))}))
                  .complete());
  Must(trainer.Begin(0));
}

}  // namespace
}  // namespace muond::cluster
