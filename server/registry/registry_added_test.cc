// Parameters that are added to a run: nothing moves, and what was refused at Register is refused
// here.
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/registry/registry.h"
#include "server/registry/run_for_test.h"

namespace muond {
namespace {

RunSpec Base(std::int64_t world_size = 1) {
  RunSpec run = RunOf({});
  run.world_size = world_size;
  for (int i = 0; i < 5; ++i) {
    run.parameters.push_back(Tensor(absl::StrFormat("w%d", i), {64 + 16 * i, 256}, Role::kHidden));
  }
  run.parameters.push_back(Tensor("embed", {1 << 12, 1 << 9}, Role::kEmbedding));
  return run;
}

std::vector<ParameterSpec> Added() {
  return {Tensor("new.big", {512, 512}, Role::kHidden),
          Tensor("new.table", {1 << 12, 1 << 9}, Role::kEmbedding),
          Tensor("new.bias", {512}, Role::kBias)};
}

Placement Over(int daemons, int self = 0) {
  return {.plan = {.devices_per_daemon = std::vector<int>(daemons, 1)}, .daemon = self};
}

RankSlices Whole(const std::vector<ParameterSpec>& parameters) {
  RankSlices slices;
  for (const ParameterSpec& spec : parameters) {
    slices[spec.name] = {Box{Dims(spec.shape->size(), 0), *spec.shape}};
  }
  return slices;
}

TEST(RegistryAdded, NothingThatWasThereMoves) {
  for (const int daemons : {1, 2, 3, 5, 8}) {
    const auto before = *Registry::Create(Base(), {}, Over(daemons));
    const auto after = before.WithAdded({}, Added(), {}, Over(daemons));
    ASSERT_TRUE(after.ok()) << after.status();
    for (int p = 0; p < 6; ++p) {
      const auto was = before.plan().ShardsOf(p), is = after->plan().ShardsOf(p);
      EXPECT_TRUE(std::equal(was.begin(), was.end(), is.begin(), is.end())) << daemons << " " << p;
    }
    for (int p = 6; p < 9; ++p) EXPECT_FALSE(after->plan().ShardsOf(p).empty());
    EXPECT_NE(before.plan().hash, after->plan().hash);
  }
}

// A daemon that has restarted is told of the run as it is now and must come to the others' plan.
TEST(RegistryAdded, ARunThatIsOpenedAnewHasThePlanOfTheOneThatGrew) {
  const auto grown =
      *Registry::Create(Base(), {}, Over(3))
           ->WithAdded({}, Added(), {}, Over(3))
           ->WithAdded({}, {Tensor("newer", {300, 300}, Role::kHidden)}, {}, Over(3));
  const auto anew = Registry::Create(grown.spec(), {}, Over(3, 1));
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_EQ(anew->plan().hash, grown.plan().hash);
  EXPECT_EQ(grown.spec().additions, (std::vector<std::int64_t>{6, 9}));
  // Without the borders it would be another: what they say is needed.
  RunSpec flat = grown.spec();
  flat.additions.clear();
  EXPECT_NE(Registry::Create(flat, {}, Over(3))->plan().hash, grown.plan().hash);
}

TEST(RegistryAdded, RanksBringTheirFormerSlicesAlong) {
  auto before = *Registry::Create(Base(2), {}, Over(1));
  const RankSlices all = Whole(Base().parameters);
  ASSERT_TRUE(before.Join(0, "a", all).ok());
  ASSERT_TRUE(before.Join(1, "b", {}).ok());
  auto after = *before.WithAdded({}, Added(), {}, Over(1));
  ASSERT_TRUE(after.JoinAdded(before, 1, Whole(Added())).ok());
  EXPECT_FALSE(after.complete());
  ASSERT_TRUE(after.JoinAdded(before, 0, {}).ok());
  EXPECT_TRUE(after.complete());
  EXPECT_EQ(after.SlicesOf(0, 0).size(), 1U);
  EXPECT_EQ(after.SlicesOf(6, 1).size(), 1U);
  // A trainer that restarts knows the first six only; one that goes on knows all.
  EXPECT_TRUE(after.CheckSameSpec(Base(2)).ok());
  EXPECT_TRUE(after.CheckSameSpec(after.spec()).ok());
  EXPECT_TRUE(after.Join(0, "a", all, 6)->rejoined);
  EXPECT_STATUS(after.Join(1, "b", all, 6), absl::IsAlreadyExists, "with other slices");
  RunSpec less = Base(2);
  less.parameters.pop_back();
  EXPECT_STATUS(after.CheckSameSpec(less), absl::IsInvalidArgument, "number of parameters");
  // What it adds then is there already, or something else.
  EXPECT_TRUE(after.CheckAdded(1, 6, Added(), Whole(Added())).ok());
  EXPECT_STATUS(after.CheckAdded(0, 6, Added(), Whole(Added())), absl::IsInvalidArgument,
                "\"new.big\": it was added with other slices");
  auto other = Added();
  other[2].shape = Dims{511};
  EXPECT_STATUS(after.CheckAdded(1, 6, other, {}), absl::IsInvalidArgument,
                "\"new.bias\": shape: the run has [512], this rank sent [511]");
  EXPECT_STATUS(after.CheckAdded(1, 5, Added(), {}), absl::IsInvalidArgument,
                "no addition began there");
}

TEST(RegistryAdded, AGapInWhatIsAddedIsNamed) {
  auto before = *Registry::Create(Base(2), {}, Over(1));
  ASSERT_TRUE(before.Join(0, "a", Whole(Base().parameters)).ok());
  ASSERT_TRUE(before.Join(1, "b", {}).ok());
  auto after = *before.WithAdded({}, {Tensor("new", {4, 4}, Role::kHidden)}, {}, Over(1));
  ASSERT_TRUE(after.JoinAdded(before, 0, {{"new", {Box{{0, 0}, {2, 4}}}}}).ok());
  EXPECT_STATUS(after.JoinAdded(before, 1, {{"new", {Box{{3, 0}, {1, 4}}}}}),
                absl::IsInvalidArgument, "parameter \"new\"");
  EXPECT_STATUS(after.JoinAdded(before, 1, {{"w0", {Box{{0, 0}, {1, 256}}}}}),
                absl::IsInvalidArgument, "\"w0\": rank 1: was there before");
  EXPECT_TRUE(after.JoinAdded(before, 1, {{"new", {Box{{2, 0}, {2, 4}}}}}).ok());
}

TEST(RegistryAdded, WhatRegisterWouldRefuseIsRefused) {
  const auto run = *Registry::Create(Base(), {}, Over(2));
  const auto add = [&](const ParameterSpec& spec, const RegistryLimits& limits = {}) {
    return run.WithAdded({}, {spec}, limits, Over(2));
  };
  EXPECT_STATUS(add(Tensor("w0", {4, 4}, Role::kHidden)), absl::IsAlreadyExists, "\"w0\"");
  ParameterSpec lost = Tensor("new", {4, 4}, Role::kHidden);
  lost.group = "none";
  EXPECT_FALSE(add(lost).ok());
  EXPECT_STATUS(add(Tensor("new", {4, 4}, Role::kHidden), {.parameters_max = 6}),
                absl::IsResourceExhausted, "--max-parameters");
  EXPECT_STATUS(run.WithAdded({}, {}, {}, Over(2)), absl::IsInvalidArgument, "there is none");
  RunSpec tied = Base();
  tied.parameters[0].tie = "t";
  ParameterSpec late = Tensor("new", *tied.parameters[0].shape, Role::kHidden);
  late.tie = "t";
  EXPECT_STATUS(Registry::Create(tied, {}, Over(2))->WithAdded({}, {late}, {}, Over(2)),
                absl::IsInvalidArgument, "can't share the state");
  // Flattened shards in place of matrices: the run's other matrices are no excuse.
  EXPECT_STATUS(add(Tensor("new", {16}, Role::kHidden)), absl::IsFailedPrecondition,
                "silently inactive");
  EXPECT_STATUS(run.WithAdded({GroupOf("m", Algorithm::kMuon)},
                              {Tensor("new", {4, 4}, Role::kHidden)}, {}, Over(2)),
                absl::IsFailedPrecondition, "group \"m\" asks for Muon");
}

}  // namespace
}  // namespace muond
