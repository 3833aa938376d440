#include "server/registry/registry.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/registry/run_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Box Flat(std::int64_t begin, std::int64_t end) { return {{begin}, {end - begin}, true}; }

RunSpec RunOfRanks(std::int64_t world_size, std::vector<ParameterSpec> parameters) {
  RunSpec run = RunOf(std::move(parameters));
  run.world_size = world_size;
  return run;
}

Registry Open(const RunSpec& run, const RegistryLimits& limits = {}) {
  auto registry = Registry::Create(run, limits);
  EXPECT_TRUE(registry.ok()) << registry.status();
  return *std::move(registry);
}

ParameterSpec Replicated(std::string name, Dims shape) {
  ParameterSpec spec = Tensor(std::move(name), std::move(shape));
  spec.replicated = true;
  return spec;
}

// ---- Create -----------------------------------------------------------------------------------

TEST(Registry, AnEmptyModelIsRefused) {
  EXPECT_STATUS(Registry::Create(RunOf({}), {}), absl::IsInvalidArgument,
                "run \"r\": has no parameters");
}

TEST(Registry, FindsParametersByName) {
  const Registry registry = Open(RunOf({Tensor("a", {2}), Tensor("b", {2})}));
  EXPECT_EQ(registry.Find("b"), 1);
  EXPECT_EQ(registry.Find("c"), -1);
  EXPECT_EQ(registry.routing().parameters[1].name, "b");
}

// B-034: each group keeps its own hyperparameters; nothing flattens them into one.
TEST(Registry, DeepSpeed8440_GroupsKeepTheirHyperparameters) {
  RunSpec run = RunOf({Tensor("a", {2, 2}), Tensor("b", {2, 2})});
  run.groups.push_back(GroupOf("h", Algorithm::kAuto));
  run.groups[0].muon = {.lr = 1e-3, .weight_decay = 0.1};
  run.groups[1].muon = {.lr = 1e-4, .weight_decay = 0};
  run.parameters[1].group = "h";
  const Registry registry = Open(run);
  EXPECT_EQ(registry.spec().groups[0].muon.lr, 1e-3);
  EXPECT_EQ(registry.spec().groups[0].muon.weight_decay, 0.1);
  EXPECT_EQ(registry.spec().groups[1].muon.lr, 1e-4);
  EXPECT_EQ(registry.spec().groups[1].muon.weight_decay, 0);
  EXPECT_EQ(registry.spec().parameters[1].group, "h");
}

TEST(Registry, LimitsNameTheNumberTheLimitAndTheFlag) {
  const auto run = RunOfRanks(2, {Tensor("w", {1024, 1024}), Tensor("b", {4})});
  EXPECT_STATUS(Registry::Create(run, {.tensor_bytes_max = (4 << 20) - 1}),
                absl::IsResourceExhausted,
                "parameter \"w\" of shape [1024, 1024]: has 4194304 bytes in fp32, the daemon's "
                "limit is 4194303: raise --max-tensor-bytes");
  EXPECT_STATUS(Registry::Create(run, {.parameters_max = 1}), absl::IsResourceExhausted,
                "run \"r\": has 2 parameters, the daemon's limit is 1: raise --max-parameters");
  EXPECT_STATUS(Registry::Create(run, {.world_size_max = 1}), absl::IsResourceExhausted,
                "--max-world-size");
  EXPECT_TRUE(
      Registry::Create(run, {.parameters_max = 2, .tensor_bytes_max = 4 << 20, .world_size_max = 2})
          .ok());
}

TEST(Registry, TensorsBeyondTwoGibibytesNeedTheFlag) {
  const auto run = RunOf({Tensor("w", {1 << 15, (1 << 14) + 1})});
  EXPECT_STATUS(Registry::Create(run, {}), absl::IsResourceExhausted,
                "2147614720 bytes in fp32, the daemon's limit is 2147483648");
  EXPECT_TRUE(Registry::Create(RunOf({Tensor("w", {1 << 15, 1 << 14})}), {}).ok());
}

// A shape of half a billion one-element experts is refused for its size before it is ever listed.
TEST(Registry, LimitsComeBeforeRouting) {
  EXPECT_STATUS(
      Registry::Create(
          RunOf({Tensor("w", {std::int64_t{1} << 30, 1, 1}, Role::kHidden, Kind::kExperts)}), {}),
      absl::IsResourceExhausted, "--max-tensor-bytes");
}

TEST(Registry, RunBytesCountStateOncePerTieAndEveryStagedGradient) {
  ParameterSpec w = Tensor("w", {10, 10});  // Muon: master, momentum, fp32 gradient
  ParameterSpec b = Tensor("b", {10});      // AdamW: master, two moments, bf16 gradient
  b.dtype = Dtype::kBF16;
  ParameterSpec tied = b;
  tied.name = "c";
  b.tie = tied.tie = "T";  // a second gradient, no second state
  const auto run = RunOf({w, b, tied});
  const std::int64_t bytes = 100 * (8 + 4) + 10 * (12 + 2) + 10 * 2;
  EXPECT_TRUE(Registry::Create(run, {.run_bytes_max = bytes}).ok());
  EXPECT_STATUS(Registry::Create(run, {.run_bytes_max = bytes - 1}), absl::IsResourceExhausted,
                absl::StrFormat("run \"r\": has %d bytes of optimizer state and staged gradients, "
                                "the daemon's limit is %d: raise --max-run-bytes",
                                bytes, bytes - 1));
  EXPECT_TRUE(Registry::Create(run, {.run_bytes_max = 0}).ok());
}

TEST(Registry, AMomentumInBf16TakesHalf) {
  auto run = RunOf({Tensor("w", {10, 10}), Tensor("b", {10})});
  EXPECT_EQ(Registry::Create(run, {})->state_bytes(), 100 * 8 + 10 * 12);
  run.groups[0].momentum_dtype = Dtype::kBF16;
  EXPECT_EQ(Registry::Create(run, {})->state_bytes(), 100 * 6 + 10 * 12) << "AdamW's stays";
}

TEST(Registry, RunBytesThatCannotBeCountedAreRefused) {
  const std::int64_t big = std::int64_t{1} << 59;
  const auto run = RunOf({Tensor("a", {big}), Tensor("b", {big})});
  const std::int64_t max = INT64_MAX;
  EXPECT_STATUS(Registry::Create(run, {.tensor_bytes_max = max, .run_bytes_max = max - 1}),
                absl::IsResourceExhausted, "more than can be counted");
}

// ---- Join -------------------------------------------------------------------------------------

TEST(Join, RanksComeOneByOne) {
  Registry registry = Open(RunOfRanks(3, {Tensor("w", {4, 3})}));
  EXPECT_THAT(registry.missing_ranks(), ElementsAre(0, 1, 2));
  const auto first = registry.Join(1, "rank-1", {{"w", {Flat(6, 12)}}});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->rejoined);
  EXPECT_THAT(first->missing_ranks, ElementsAre(0, 2));
  EXPECT_FALSE(registry.complete());
  ASSERT_TRUE(registry.Join(2, "rank-2", {}).ok());  // a rank without slices is a rank
  const auto last = registry.Join(0, "rank-0", {{"w", {Flat(0, 6)}}});
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_THAT(last->missing_ranks, IsEmpty());
  EXPECT_TRUE(registry.complete());
  EXPECT_THAT(registry.joined_ranks(), ElementsAre(0, 1, 2));
  EXPECT_EQ(registry.SlicesOf(0, 1), std::vector{Flat(6, 12)});
  EXPECT_THAT(registry.SlicesOf(0, 2), IsEmpty());
  EXPECT_THAT(registry.SlicesOf(0, 9), IsEmpty());
}

// B-042: a restarted trainer that brings the same is welcome; another one is not.
TEST(Join, PyTorch40967_TheSameAgainIsARejoin) {
  Registry registry = Open(RunOfRanks(2, {Tensor("w", {4, 3})}));
  const RankSlices slices = {{"w", {Flat(0, 4), Flat(4, 6)}}};
  ASSERT_TRUE(registry.Join(0, "a", slices).ok());
  const auto again = registry.Join(0, "a", slices);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->rejoined);
  EXPECT_THAT(again->missing_ranks, ElementsAre(1));
  EXPECT_STATUS(registry.Join(0, "b", slices), absl::IsAlreadyExists,
                "rank 0: is held by another session");
  // The order of the boxes is the meaning of the slice index.
  EXPECT_STATUS(registry.Join(0, "a", {{"w", {Flat(4, 6), Flat(0, 4)}}}), absl::IsAlreadyExists,
                "rank 0: joined before with other slices");
  EXPECT_THAT(registry.joined_ranks(), ElementsAre(0));
}

TEST(Join, RefusesUnknownRanksAndParameters) {
  Registry registry = Open(RunOfRanks(2, {Tensor("w", {4, 3})}));
  for (const std::int64_t rank : {-1, 2}) {
    EXPECT_STATUS(registry.Join(rank, "s", {}), absl::IsInvalidArgument,
                  absl::StrFormat("rank %d: is not one of the run's trainer ranks 0..1", rank));
  }
  EXPECT_STATUS(registry.Join(0, "s", {{"w_typo", {}}}), absl::IsNotFound,
                "parameter \"w_typo\": rank 0 has slices of it");
}

TEST(Join, TooManySlicesNameTheFlag) {
  Registry registry = Open(RunOf({Tensor("w", {4, 3})}), {.slices_per_rank_max = 1});
  EXPECT_STATUS(registry.Join(0, "s", {{"w", {Flat(0, 6), Flat(6, 12)}}}),
                absl::IsResourceExhausted,
                "rank 0: has 2 slices, the daemon's limit is 1: raise --max-slices-per-rank");
}

// B-054: slices must tile every tensor before a run starts.
TEST(Join, MegatronLm6048_AGapIsFoundWithTheLastRank) {
  Registry registry = Open(RunOfRanks(2, {Tensor("v", {2}), Tensor("w", {4, 3})}));
  ASSERT_TRUE(registry.Join(0, "s", {{"v", {Flat(0, 2)}}, {"w", {Flat(0, 6)}}}).ok());
  EXPECT_STATUS(registry.Join(1, "s", {{"w", {Flat(8, 12)}}}), absl::IsInvalidArgument,
                "parameter \"w\": elements [6, 8) of 12 are in no rank's slices; the slices of all "
                "2 ranks have 10 elements, shape [4, 3] has 12");
  EXPECT_THAT(registry.missing_ranks(), ElementsAre(1));
  EXPECT_TRUE(registry.Join(1, "s", {{"w", {Flat(6, 12)}}}).ok());
}

TEST(Join, MegatronLm6048_AnOverlapIsFoundAtOnce) {
  Registry registry = Open(RunOfRanks(3, {Tensor("w", {4, 3})}));
  ASSERT_TRUE(registry.Join(0, "s", {{"w", {Flat(0, 7)}}}).ok());
  EXPECT_STATUS(
      registry.Join(1, "s", {{"w", {Flat(6, 12)}}}), absl::IsInvalidArgument,
      "parameter \"w\": slices of ranks 0 and 1 overlap at elements [6, 7); the slices of "
      "all ranks have 13 elements, shape [4, 3] has 12");
  // Blocks and ranges meet too, and blocks each other.
  EXPECT_STATUS(registry.Join(1, "s", {{"w", {{{2, 0}, {2, 1}}}}}), absl::IsInvalidArgument,
                "overlap at elements [6, 7)");
  ASSERT_TRUE(registry.Join(1, "s", {{"w", {{{2, 1}, {1, 2}}}}}).ok());
  EXPECT_STATUS(registry.Join(2, "s", {{"w", {{{2, 2}, {2, 1}}}}}), absl::IsInvalidArgument,
                "slices of ranks 1 and 2 overlap at elements [8, 9)");
}

TEST(Join, ARankThatBringsManyBoxesIsCheckedAsWell) {
  Registry registry = Open(RunOfRanks(2, {Tensor("w", {100})}));
  RankSlices even;
  RankSlices odd;
  for (std::int64_t i = 0; i < 100; ++i) (i % 2 == 0 ? even : odd)["w"].push_back(Flat(i, i + 1));
  ASSERT_TRUE(registry.Join(0, "s", even).ok());
  RankSlices bad = odd;
  bad["w"][40] = Flat(80, 81);
  EXPECT_STATUS(registry.Join(1, "s", bad), absl::IsInvalidArgument,
                "slices of ranks 0 and 1 overlap at elements [80, 81)");
  EXPECT_TRUE(registry.Join(1, "s", odd).ok());
}

TEST(Join, OneRankMustNotOverlapItself) {
  Registry registry = Open(RunOfRanks(2, {Tensor("w", {4, 3})}));
  EXPECT_STATUS(registry.Join(0, "s", {{"w", {Flat(0, 7), Flat(6, 8)}}}), absl::IsInvalidArgument,
                "slices of rank 0 overlap at elements [6, 7)");
}

// B-028: a box beyond the declared shape says what a placeholder's shape would look like.
TEST(Join, DeepSpeed8438_BoxesOutsideTheShapeNameBothCounts) {
  Registry registry = Open(RunOf({Tensor("w", {4, 3})}));
  EXPECT_STATUS(
      registry.Join(0, "s", {{"w", {Flat(0, 65536)}}}), absl::IsInvalidArgument,
      "parameter \"w\": rank 0, slice 0: box flat [0:65536] lies outside shape [4, 3] (12 "
      "elements): if the shape is a partitioned placeholder's, send the layer's");
  EXPECT_STATUS(registry.Join(0, "s", {{"w", {Flat(0, 12), Flat(12, 12)}}}),
                absl::IsInvalidArgument, "slice 1: box flat [12:12] has no elements: leave it out");
}

// B-027: a matrix that comes in flat shards is still the matrix.
TEST(Join, DeepSpeed8442_FlatShardsOfAMatrixAreRoutedByTheLogicalShape) {
  Registry registry = Open(RunOfRanks(2, {Tensor("w", {4, 4})}));
  ASSERT_TRUE(registry.Join(0, "s", {{"w", {Flat(0, 8)}}}).ok());
  ASSERT_TRUE(registry.Join(1, "s", {{"w", {Flat(8, 16)}}}).ok());
  EXPECT_EQ(registry.routing().parameters[0].algorithm, Algorithm::kMuon);
  EXPECT_EQ(registry.routing().parameters[0].matrices,
            (std::vector<MatrixBlock>{{4, 4, {{0, 4}}}}));
}

// B-029: six experts on four ranks are fine when all are there, and refused when one is lost.
TEST(Join, VeOmni1011_ExpertsNeedNotDivideTheRanksButMustAllBeThere) {
  const auto experts = [](std::int64_t first, std::int64_t count) {
    return RankSlices{{"w", {Box{{first, 0, 0}, {count, 4, 4}}}}};
  };
  const auto run = RunOfRanks(4, {Tensor("w", {6, 4, 4}, Role::kHidden, Kind::kExperts)});
  Registry registry = Open(run);
  ASSERT_TRUE(registry.Join(0, "s", experts(0, 2)).ok());
  ASSERT_TRUE(registry.Join(1, "s", experts(2, 2)).ok());
  ASSERT_TRUE(registry.Join(2, "s", experts(4, 1)).ok());
  EXPECT_STATUS(registry.Join(3, "s", {}), absl::IsInvalidArgument, "elements [80, 96) of 96");
  EXPECT_TRUE(registry.Join(3, "s", experts(5, 1)).ok());
}

TEST(Join, EachReplicaIsWhole) {
  Registry registry = Open(RunOfRanks(3, {Replicated("w", {4, 3})}));
  EXPECT_STATUS(
      registry.Join(0, "s", {{"w", {Flat(0, 6)}}}), absl::IsInvalidArgument,
      "parameter \"w\": elements [6, 12) of 12 are in no rank's slices; it is replicated, "
      "so that rank 0 must hold all 12 elements of shape [4, 3], its slices have 6");
  EXPECT_STATUS(registry.Join(0, "s", {{"w", {Flat(0, 7), Flat(6, 12)}}}), absl::IsInvalidArgument,
                "overlap at elements [6, 7)");
  ASSERT_TRUE(registry.Join(0, "s", {{"w", {WholeBox({4, 3})}}}).ok());
  ASSERT_TRUE(registry.Join(1, "s", {{"w", {Flat(0, 6), Flat(6, 12)}}}).ok());
  EXPECT_TRUE(registry.Join(2, "s", {}).ok());
}

TEST(Join, AReplicatedParameterNeedsOneHolder) {
  Registry registry = Open(RunOf({Replicated("w", {4, 3})}));
  EXPECT_STATUS(registry.Join(0, "s", {}), absl::IsInvalidArgument,
                "parameter \"w\": elements [0, 12) of 12 are in no rank's slices");
}

// B-043: of names that are one tensor only the first is pushed; summed ones each have their own.
TEST(Join, DeepSpeed195_TiedNames) {
  ParameterSpec emb = Tensor("emb", {4, 3}, Role::kEmbedding);
  ParameterSpec head = Tensor("head", {4, 3}, Role::kLmHead);
  emb.tie = head.tie = "E";
  const RankSlices both = {{"emb", {Flat(0, 12)}}, {"head", {Flat(0, 12)}}};
  const RankSlices one = {{"emb", {Flat(0, 12)}}};
  Registry summed = Open(RunOf({emb, head}));
  EXPECT_STATUS(summed.Join(0, "s", one), absl::IsInvalidArgument, "parameter \"head\": elements");
  EXPECT_TRUE(summed.Join(0, "s", both).ok());

  emb.tie_reduction = head.tie_reduction = TieReduction::kSame;
  Registry same = Open(RunOf({emb, head}));
  EXPECT_STATUS(same.Join(0, "s", both), absl::IsInvalidArgument,
                "parameter \"head\": rank 0: has slices of a name tied as the same tensor: push "
                "\"emb\" only");
  EXPECT_TRUE(same.Join(0, "s", one).ok());
}

// B-053: slices of a tensor without elements are nothing to wait for.
TEST(Join, TransformerEngine3207_EmptyTensorsHaveNoSlices) {
  ParameterSpec empty = Tensor("empty", {0, 4});
  empty.allow_empty = true;
  Registry registry = Open(RunOf({empty, Tensor("w", {2, 2})}));
  ASSERT_TRUE(
      registry.Join(0, "s", {{"empty", {WholeBox({0, 4})}}, {"w", {WholeBox({2, 2})}}}).ok());
  EXPECT_THAT(registry.SlicesOf(0, 0), IsEmpty());
  EXPECT_EQ(registry.SlicesOf(1, 0).size(), 1u);
}

// A refusal half way through a rank's parameters takes nothing of it.
TEST(Join, ARefusalChangesNothing) {
  Registry registry = Open(RunOfRanks(2, {Tensor("a", {4}), Tensor("b", {4})}));
  ASSERT_TRUE(registry.Join(0, "s", {{"b", {Flat(0, 3)}}}).ok());
  EXPECT_FALSE(registry.Join(1, "s", {{"a", {Flat(0, 4)}}, {"b", {Flat(2, 4)}}}).ok());
  EXPECT_FALSE(registry.Join(1, "s", {{"a", {Flat(0, 4)}}}).ok());
  EXPECT_THAT(registry.joined_ranks(), ElementsAre(0));
  EXPECT_THAT(registry.SlicesOf(0, 1), IsEmpty());
  // Had "a" stayed behind, it would overlap itself now.
  EXPECT_TRUE(registry.Join(1, "s", {{"a", {Flat(0, 4)}}, {"b", {Flat(3, 4)}}}).ok());
}

TEST(CheckSameSpec, NamesTheFirstDifference) {
  const RunSpec run = RunOf({Tensor("w", {4, 4})});
  const Registry registry = Open(run);
  EXPECT_TRUE(registry.CheckSameSpec(run).ok());
  EXPECT_STATUS(
      registry.CheckSameSpec(RunOf({Tensor("w", {2, 4})})), absl::IsInvalidArgument,
      "run \"r\": is open with another specification: parameter \"w\": shape: the run has "
      "[4, 4], this rank sent [2, 4]");
}

}  // namespace
}  // namespace muond
