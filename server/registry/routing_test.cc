#include "server/registry/routing.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/registry/run_for_test.h"

namespace muond {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Routing Route(const RunSpec& run) {
  const auto routing = RouteParameters(run);
  EXPECT_TRUE(routing.ok()) << routing.status();
  return routing.value_or(Routing());
}

// "muon: hidden matrix" of a run's one parameter.
std::string Verdict(const ParameterSpec& spec, Algorithm algorithm = Algorithm::kAuto) {
  const Routing routing = Route(RunOf({spec}, algorithm));
  if (routing.parameters.size() != 1) return "none";
  const RoutedParameter& routed = routing.parameters[0];
  return std::string(AlgorithmName(routed.algorithm)) + ": " + routed.reason;
}

// ---- auto -------------------------------------------------------------------------------------

TEST(Routing, AutoTakesMatricesOfRoleHidden) {
  EXPECT_EQ(Verdict(Tensor("w", {4, 3}, Role::kHidden)), "muon: hidden matrix");
  EXPECT_EQ(Verdict(Tensor("w", {2, 4, 3}, Role::kHidden, Kind::kExperts)),
            "muon: hidden expert stack");
  EXPECT_EQ(Verdict(Tensor("w", {8, 4, 3, 3}, Role::kHidden, Kind::kConv)),
            "muon: hidden convolution");
}

TEST(Routing, AutoLeavesTheOtherRolesToAdamW) {
  EXPECT_EQ(Verdict(Tensor("w", {4, 3}, Role::kEmbedding)), "adamw: embedding by role");
  EXPECT_EQ(Verdict(Tensor("w", {4, 3}, Role::kLmHead)), "adamw: lm_head by role");
  EXPECT_EQ(Verdict(Tensor("w", {4, 3}, Role::kOther)), "adamw: other by role");
  EXPECT_EQ(Verdict(Tensor("w", {4}, Role::kNorm)), "adamw: norm by role");
  EXPECT_EQ(Verdict(Tensor("w", {4}, Role::kBias)), "adamw: bias by role");
}

TEST(Routing, AutoLeavesVectorsAndScalarsToAdamW) {
  EXPECT_EQ(Verdict(Tensor("w", {4})), "adamw: vector");
  EXPECT_EQ(Verdict(Tensor("w", {})), "adamw: scalar");
}

TEST(Routing, HiddenVectorsBesideHiddenMatricesGoToAdamW) {
  const Routing routing =
      Route(RunOf({Tensor("w", {4, 4}, Role::kHidden), Tensor("g", {4}, Role::kHidden)}));
  EXPECT_EQ(routing.parameters[1].reason, "vector");
}

TEST(Routing, DeepSpeed8438_ARunOfFlattenedHiddenShardsIsRefused) {
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", {65536}, Role::kHidden)})),
                absl::IsFailedPrecondition, "send the layers' logical shapes");
}

TEST(Routing, ASplitIntoSingleRowsDoesNotTakeAMatrixFromMuonSilently) {
  ParameterSpec rows = Tensor("w", {4, 4}, Role::kHidden);
  rows.split.sizes = {1, 1, 1, 1};
  EXPECT_STATUS(RouteParameters(RunOf({rows})), absl::IsFailedPrecondition, "\"w\"");
  EXPECT_EQ(Verdict(rows, Algorithm::kMuon), "muon: group algorithm muon");
}

TEST(Routing, AMuonGroupOfEmptyTensorsOnlyIsRefused) {
  ParameterSpec empty = Tensor("w", {0, 4});
  empty.allow_empty = true;
  EXPECT_STATUS(RouteParameters(RunOf({empty}, Algorithm::kMuon)), absl::IsFailedPrecondition,
                "silently inactive");
}

TEST(Routing, TheNameDecidesOnlyWhereNoRoleIsDeclared) {
  EXPECT_EQ(Verdict(Tensor("tok_Embeddings.w", {4, 3})), "adamw: name contains \"embed\"");
  EXPECT_EQ(Verdict(Tensor("LM_Head", {4, 3})), "adamw: name contains \"lm_head\"");
  EXPECT_EQ(Verdict(Tensor("moe.Router.w", {4, 3})), "adamw: name contains \"router\"");
  EXPECT_EQ(Verdict(Tensor("fc", {4, 3})), "muon: matrix without a role, taken as hidden");
  EXPECT_EQ(Verdict(Tensor("embed_proj", {4, 3}, Role::kHidden)), "muon: hidden matrix");
  EXPECT_EQ(Verdict(Tensor("fc", {4, 3}, Role::kEmbedding)), "adamw: embedding by role");
}

TEST(Routing, AutoLeavesDegenerateMatricesToAdamW) {
  EXPECT_EQ(Verdict(Tensor("w", {1, 9}, Role::kHidden)), "adamw: degenerate matrix (1 x 9)");
  EXPECT_EQ(Verdict(Tensor("w", {9, 1}, Role::kHidden)), "adamw: degenerate matrix (9 x 1)");
  EXPECT_EQ(Verdict(Tensor("w", {5, 1, 9}, Role::kHidden, Kind::kExperts)),
            "adamw: degenerate matrix (1 x 9)");
}

TEST(Routing, ExclusionIsTheTrainersWord) {
  ParameterSpec spec = Tensor("w", {4, 3}, Role::kHidden);
  spec.exclude = true;
  EXPECT_EQ(Verdict(spec), "adamw: excluded by the trainer");
}

// ---- Groups -----------------------------------------------------------------------------------

TEST(Routing, AMuonGroupBeatsRoleNameAndDegeneracy) {
  EXPECT_EQ(Verdict(Tensor("embed", {4, 3}, Role::kEmbedding), Algorithm::kMuon),
            "muon: group algorithm muon");
  EXPECT_EQ(Verdict(Tensor("w", {1, 9}), Algorithm::kMuon), "muon: group algorithm muon");
}

TEST(Routing, AnAdamWGroupIsAnExplicitExclusion) {
  EXPECT_EQ(Verdict(Tensor("w", {4, 3}, Role::kHidden), Algorithm::kAdamW),
            "adamw: group algorithm adamw");
}

TEST(Routing, AMuonGroupRefusesWhatIsNoMatrixAndNamesAll) {
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", {4, 3}), Tensor("b1", {4}), Tensor("b2", {})},
                                      Algorithm::kMuon)),
                absl::IsInvalidArgument, "parameters \"b1\", \"b2\": Muon was asked for");
}

TEST(Routing, ThousandsOfNamesStillFitAnErrorMessage) {
  std::vector<ParameterSpec> parameters(10'000);
  for (int i = 0; i < 10'000; ++i) {
    parameters[i] = Tensor("layers." + std::to_string(i) + ".bias", {4});
  }
  const auto status = RouteParameters(RunOf(parameters, Algorithm::kMuon)).status();
  EXPECT_LT(status.message().size(), 4096u);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("\"layers.0.bias\", \"layers.1.bias\""), HasSubstr(" more")));
}

// B-041: a refusal names both of the options that don't go together.
TEST(Routing, MegatronLm2164_ExcludeConflictsWithAMuonGroup) {
  ParameterSpec spec = Tensor("w", {4, 3});
  spec.exclude = true;
  EXPECT_STATUS(RouteParameters(RunOf({spec}, Algorithm::kMuon)), absl::IsInvalidArgument,
                "parameter \"w\": exclude conflicts with algorithm muon of group \"g\"");
}

TEST(Routing, AMuonGroupWithoutParametersIsRefused) {
  RunSpec run = RunOf({Tensor("w", {4, 3})});
  run.groups.push_back(GroupOf("hidden", Algorithm::kMuon));
  EXPECT_STATUS(RouteParameters(run), absl::IsFailedPrecondition,
                "group \"hidden\" asks for Muon, but no parameter with elements is in it");
  run.groups.back().algorithm = Algorithm::kAuto;
  EXPECT_TRUE(RouteParameters(run).ok());
}

TEST(Routing, UnknownAndDoubledGroups) {
  RunSpec run = RunOf({Tensor("w", {4, 3})});
  run.parameters[0].group = "h";
  EXPECT_STATUS(RouteParameters(run), absl::IsInvalidArgument,
                "parameter \"w\": group \"h\" is not one of the run's");
  run.groups = {GroupOf("h", Algorithm::kAuto), GroupOf("h", Algorithm::kMuon)};
  EXPECT_STATUS(RouteParameters(run), absl::IsAlreadyExists, "group \"h\"");
}

// ---- Shapes -----------------------------------------------------------------------------------

// B-028: zero.Init shows the shape (0,); the logical one decides, however the tensor is cut.
TEST(Routing, DeepSpeed8438_PlaceholdersAreRefused) {
  EXPECT_EQ(Verdict(Tensor("w", {256, 256})), "muon: matrix without a role, taken as hidden");
  ParameterSpec missing = Tensor("w", {});
  missing.shape.reset();
  EXPECT_STATUS(RouteParameters(RunOf({missing})), absl::IsInvalidArgument,
                "parameter \"w\": shape is missing, as that of a partitioned placeholder is: send "
                "the layer's logical shape (ds_shape");
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", {0})})), absl::IsInvalidArgument,
                "parameter \"w\": shape [0] has no elements: a partitioned placeholder (ZeRO-3 "
                "zero.Init shows shape (0,)): send the layer's shape (ds_shape)");
}

TEST(Routing, ImpossibleShapesNameTheParameter) {
  const std::int64_t big = std::int64_t{1} << 40;
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", {big, big})})), absl::IsInvalidArgument,
                "parameter \"w\": shape [1099511627776, 1099511627776] has more elements");
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", Dims(9, 1))})), absl::IsInvalidArgument,
                "parameter \"w\": shape");
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", {2, 2, 2})})), absl::IsInvalidArgument, "guess");
}

TEST(Routing, ASplitNeedsAMatrixWhoseRowsItTiles) {
  ParameterSpec spec = Tensor("w", {5});
  spec.split.sizes = {2, 2, 1};
  EXPECT_STATUS(RouteParameters(RunOf({spec})), absl::IsInvalidArgument,
                "parameter \"w\": split of a vector");
  spec.shape = Dims{6, 2};
  EXPECT_STATUS(RouteParameters(RunOf({spec})), absl::IsInvalidArgument, "don't tile the 6 rows");
  spec.shape = Dims{5, 2};
  EXPECT_EQ(Route(RunOf({spec})).muon_matrices, 3);
}

// B-053: a tensor without elements is a no-op for itself and for nothing else, in either order.
TEST(Routing, TransformerEngine3207_EmptyTensorsHarmNobody) {
  ParameterSpec empty = Tensor("empty", {0});
  empty.allow_empty = true;
  for (const bool first : {false, true}) {
    const ParameterSpec w = Tensor("w", {2, 2});
    const auto parameters = first ? std::vector{empty, w} : std::vector{w, empty};
    for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kMuon}) {
      const Routing routing = Route(RunOf(parameters, algorithm));
      EXPECT_EQ(routing.parameters[first ? 0 : 1].reason, "no elements");
      EXPECT_EQ(routing.parameters[first ? 0 : 1].algorithm, Algorithm::kAdamW);
      EXPECT_EQ(routing.parameters[first ? 1 : 0].algorithm, Algorithm::kMuon);
      EXPECT_EQ(routing.muon_matrices, 1);
    }
  }
}

TEST(Routing, EmptyTensorsTripNoRefusal) {
  ParameterSpec empty = Tensor("empty", {0, 4}, Role::kHidden);
  empty.allow_empty = true;
  EXPECT_EQ(Verdict(empty), "adamw: no elements");
  RunSpec run = RunOf({empty});
  run.rules = {{"empty", Algorithm::kAdamW}};
  EXPECT_TRUE(Route(run).unmatched_rules.empty());
}

// B-039: a run whose parameters all end in one half is legal.
TEST(Routing, DeepSpeed7869_OneHalfMayBeEmpty) {
  EXPECT_EQ(Route(RunOf({Tensor("w", {2, 2})})).adamw_parameters, 0);
  EXPECT_EQ(Route(RunOf({Tensor("b", {2})})).muon_parameters, 0);
}

// B-030: the report says for each parameter where it went and why.
TEST(Routing, MegatronLm130_TheReportNamesEveryParameter) {
  const Routing routing =
      Route(RunOf({Tensor("embed", {8, 4}), Tensor("w", {2, 4, 4}, Role::kHidden, Kind::kExperts),
                   Tensor("norm", {4}, Role::kNorm)}));
  ASSERT_EQ(routing.parameters.size(), 3u);
  EXPECT_EQ(routing.parameters[0].name, "embed");
  EXPECT_EQ(routing.parameters[1].name, "w");
  EXPECT_EQ(routing.parameters[1].elements, 32);
  EXPECT_EQ(routing.parameters[1].matrices.size(), 2u);
  EXPECT_TRUE(routing.parameters[0].matrices.empty());
  for (const RoutedParameter& routed : routing.parameters) EXPECT_FALSE(routed.reason.empty());
  EXPECT_EQ(routing.muon_parameters, 1);
  EXPECT_EQ(routing.adamw_parameters, 2);
  EXPECT_EQ(routing.muon_matrices, 2);
}

// B-042: one name twice would be updated twice.
TEST(Routing, PyTorch40967_ANameTwiceIsRefused) {
  EXPECT_STATUS(RouteParameters(RunOf({Tensor("w", {2, 2}), Tensor("w", {2, 2})})),
                absl::IsAlreadyExists, "parameter \"w\": the name is registered twice");
}

// ---- Ties -------------------------------------------------------------------------------------

std::pair<ParameterSpec, ParameterSpec> TiedPair() {
  auto pair =
      std::pair(Tensor("emb", {8, 4}, Role::kEmbedding), Tensor("lm_head", {8, 4}, Role::kLmHead));
  pair.first.tie = pair.second.tie = "E";
  return pair;
}

// B-043: two names of one tensor have one state.
TEST(Ties, DeepSpeed195_TiedNamesShareOneState) {
  const auto [emb, head] = TiedPair();
  const Routing routing = Route(RunOf({Tensor("w", {4, 4}), emb, head}));
  EXPECT_EQ(routing.parameters[1].state, 1);
  EXPECT_EQ(routing.parameters[2].state, 1);
  EXPECT_EQ(routing.adamw_parameters, 1);
  EXPECT_EQ(routing.muon_parameters, 1);
}

TEST(Ties, TiedMatricesAreOrthogonalizedOnce) {
  ParameterSpec a = Tensor("a", {4, 4});
  ParameterSpec b = Tensor("b", {4, 4});
  a.tie = b.tie = "T";
  const Routing routing = Route(RunOf({a, b}));
  EXPECT_EQ(routing.muon_parameters, 1);
  EXPECT_EQ(routing.muon_matrices, 1);
}

// B-032: the stage that lacks the flag sends its replica to Muon; the two drift apart.
TEST(Ties, MegatronLm4641_OneTieHasOneAlgorithm) {
  ParameterSpec emb = Tensor("emb", {8, 4});
  emb.exclude = true;
  ParameterSpec mtp = Tensor("mtp.emb", {8, 4});
  emb.tie = mtp.tie = "E";
  EXPECT_STATUS(RouteParameters(RunOf({emb, mtp})), absl::IsAlreadyExists,
                "parameter \"mtp.emb\": tied to \"emb\" as \"E\", which have one state: algorithm "
                "muon (matrix without a role, taken as hidden) conflicts with adamw (excluded by "
                "the trainer)");
  mtp.exclude = true;
  EXPECT_EQ(Route(RunOf({emb, mtp})).adamw_parameters, 1);
}

TEST(Ties, ConflictsNameBothAndTheField) {
  const auto refused = [](auto change, const char* says) {
    auto [emb, head] = TiedPair();
    change(&head);
    RunSpec run = RunOf({emb, head});
    run.groups.push_back(GroupOf("h", Algorithm::kAuto));
    EXPECT_STATUS(RouteParameters(run), absl::IsAlreadyExists, says);
  };
  refused(
      [](ParameterSpec* p) {
        p->shape = Dims{4, 8};
      },
      "parameter \"lm_head\": tied to \"emb\" as \"E\", which have one state: shape [4, 8] "
      "conflicts with [8, 4]");
  refused([](ParameterSpec* p) { p->dtype = Dtype::kBF16; }, "dtype bf16 conflicts with f32");
  refused([](ParameterSpec* p) { p->group = "h"; }, "group \"h\" conflicts with \"g\"");
  refused([](ParameterSpec* p) { p->replicated = true; }, "replicated");
  refused([](ParameterSpec* p) { p->tie_reduction = TieReduction::kSame; },
          "tie_reduction same conflicts with sum");
  ParameterSpec a = Tensor("a", {4, 4});
  ParameterSpec b = Tensor("b", {4, 4});
  a.tie = b.tie = "T";
  b.split.sizes = {2, 2};
  EXPECT_STATUS(RouteParameters(RunOf({a, b})), absl::IsAlreadyExists, "kind and split");
}

// ---- Rules ------------------------------------------------------------------------------------

RunSpec RuledRun(std::vector<ParameterSpec> parameters, std::vector<RoutingRule> rules) {
  RunSpec run = RunOf(std::move(parameters));
  run.rules = std::move(rules);
  return run;
}

// B-031: the fused w13 misses w[123], and a catch-all must not swallow it.
TEST(Rules, TorchTitan4813_ACatchAllIsNoExclusion) {
  EXPECT_STATUS(
      RouteParameters(RuledRun({Tensor("w1", {4, 4}), Tensor("w13", {8, 4}), Tensor("w4", {4, 4})},
                               {{"w[123]", Algorithm::kMuon}, {".*", Algorithm::kAdamW}})),
      absl::IsFailedPrecondition, "parameters \"w13\", \"w4\": a routing rule sends these hidden");
}

TEST(Rules, WhatIsExcludedOrNoHiddenMatrixMayFollowACatchAll) {
  ParameterSpec excluded = Tensor("w13", {8, 4});
  excluded.exclude = true;
  const Routing routing =
      Route(RuledRun({Tensor("w1", {4, 4}), excluded, Tensor("b", {4}), Tensor("embed", {8, 4}),
                      Tensor("head", {8, 4}, Role::kLmHead), Tensor("row", {1, 4}, Role::kHidden)},
                     {{"w[123]", Algorithm::kMuon}, {".*", Algorithm::kAdamW}}));
  EXPECT_EQ(routing.parameters[0].reason, "rule \"w[123]\"");
  EXPECT_EQ(routing.parameters[1].reason, "excluded by the trainer");
  EXPECT_EQ(routing.parameters[2].reason, "rule \".*\"");
  EXPECT_EQ(routing.muon_parameters, 1);
  EXPECT_EQ(routing.adamw_parameters, 5);
}

// B-029: literal keys were compared with patterns, and the check said yes to everything.
TEST(Rules, VeOmni1011_PatternsAreMatchedAgainstWholeNames) {
  const Routing routing = Route(
      RuledRun({Tensor("experts.0.w1", {4, 4}, Role::kOther), Tensor("experts.0.w12", {4, 4})},
               {{"experts.*.w1", Algorithm::kMuon}, {"expert", Algorithm::kAdamW}}));
  EXPECT_EQ(routing.parameters[0].reason, "rule \"experts.*.w1\"");
  EXPECT_EQ(routing.parameters[1].reason, "matrix without a role, taken as hidden");
  EXPECT_THAT(routing.unmatched_rules, ElementsAre("expert"));
}

TEST(Rules, AMuonRuleThatSendsNothingThereIsRefused) {
  ParameterSpec excluded = Tensor("w1", {4, 4});
  excluded.exclude = true;
  for (const ParameterSpec& spec : {Tensor("layers.0.w1", {4, 4}), excluded}) {
    EXPECT_STATUS(
        RouteParameters(RuledRun({spec}, {{"w1", Algorithm::kMuon}})), absl::IsFailedPrecondition,
        "routing rule \"w1\" asks for Muon, but sends no parameter of an auto group there");
  }
}

TEST(Rules, TheFirstMatchWins) {
  const Routing routing = Route(
      RuledRun({Tensor("w1", {4, 4}), Tensor("norm1", {4})},
               {{"w.", Algorithm::kMuon}, {"w1", Algorithm::kMuon}, {".*", Algorithm::kAuto}}));
  EXPECT_EQ(routing.parameters[0].reason, "rule \"w.\"");
  EXPECT_EQ(routing.parameters[1].reason, "vector");
  // Never asked, yet harmless: what it matches is on Muon.
  EXPECT_THAT(routing.unmatched_rules, ElementsAre("w1"));
}

TEST(Rules, AMuonRuleOnAVectorIsAnError) {
  EXPECT_STATUS(RouteParameters(RuledRun({Tensor("w", {4, 4}), Tensor("b", {4}, Role::kBias)},
                                         {{".*", Algorithm::kMuon}})),
                absl::IsInvalidArgument, "parameters \"b\": Muon was asked for by group or rule");
}

TEST(Rules, TouchAutoGroupsOnly) {
  RunSpec run = RuledRun({Tensor("w", {4, 4}), Tensor("v", {4, 4})}, {{"v", Algorithm::kMuon}});
  run.groups.push_back(GroupOf("a", Algorithm::kAdamW));
  run.parameters[0].group = "a";
  EXPECT_EQ(Route(run).parameters[0].reason, "group algorithm adamw");
  run.rules[0].pattern = "w";
  EXPECT_STATUS(RouteParameters(run), absl::IsFailedPrecondition, "routing rule \"w\"");
}

TEST(Rules, BadPatternsAndTooManyOfThem) {
  EXPECT_STATUS(RouteParameters(RuledRun({Tensor("w", {4, 4})}, {{"w(", Algorithm::kMuon}})),
                absl::IsInvalidArgument, "routing rule \"w(\": bad pattern: missing )");
  EXPECT_STATUS(RouteParameters(RuledRun({Tensor("w", {4, 4})},
                                         std::vector<RoutingRule>(257, {"x", Algorithm::kAdamW}))),
                absl::IsResourceExhausted, "257 routing rules");
}

}  // namespace
}  // namespace muond
