// Plans under a memory limit.
#include "server/registry/plan_for_test.h"

namespace muond {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

TEST(PlanMemory, IsStateStagingAndScratch) {
  RunSpec run = RunOf({Tensor("w", {1024, 2048}), Tensor("b", {4096})});
  run.parameters[0].dtype = run.parameters[1].dtype = Dtype::kBF16;
  PlanOptions options = Daemons(1);
  const OwnerLoad load = PlanOf(run, options)->owners[0];
  const std::int64_t w = 1024 * 2048;
  EXPECT_EQ(load.state_bytes, 8 * w + 12 * 4096);
  EXPECT_EQ(load.staging_bytes, 2 * (w + 4096));
  EXPECT_EQ(load.bytes_in, 2 * (w + 4096));
  EXPECT_EQ(load.bytes_out, 2 * (w + 4096));
  EXPECT_EQ(load.scratch_bytes, 4 * (2 * w + w + 4 * 1024 * 1024)) << "U, O, and products";
  EXPECT_EQ(load.MemoryBytes(), load.state_bytes + load.staging_bytes + load.scratch_bytes);
}

TEST(PlanMemory, AMomentumInBf16TakesHalf) {
  RunSpec run = RunOf({Tensor("w", {64, 32}), Tensor("b", {4096})});
  run.groups[0].momentum_dtype = Dtype::kBF16;
  const OwnerLoad load = PlanOf(run, Daemons(1))->owners[0];
  EXPECT_EQ(load.state_bytes, 6 * 64 * 32 + 12 * 4096);
  EXPECT_EQ(load.matrix_elements, 64 * 32);
}

TEST(PlanMemory, OverlapKeepsTheResultOfEveryMatrix) {
  const RunSpec run = Llama1B();
  PlanOptions options = Daemons(2);
  options.iterate_bytes = 2;
  const Plan without = PlanOf(run, options).value();
  options.overlap = true;
  const Plan with = PlanOf(run, options).value();
  EXPECT_EQ(with.hash, without.hash) << "scratch moves nothing while there is room";
  std::int64_t more = 0;
  for (int i = 0; i < 2; ++i) {
    more += with.owners[i].scratch_bytes - without.owners[i].scratch_bytes;
  }
  const std::int64_t batch = std::int64_t{32} << 20;
  EXPECT_EQ(more, 2 * (973'078'528 - 2 * batch)) << "2 bytes for each element beyond a batch";
}

TEST(PlanMemory, OnAGpuGradientsAreFp32AndNewtonSchulzTakesGroups) {
  RunSpec run = RunOf({Tensor("w", {1024, 2048}), Tensor("s", {512, 512}), Tensor("b", {4096})});
  for (ParameterSpec& spec : run.parameters) spec.dtype = Dtype::kBF16;
  PlanOptions options = Daemons(1);
  options.iterate_bytes = 2;
  options.device_memory = true;
  const OwnerLoad load = PlanOf(run, options)->owners[0];
  const std::int64_t w = 1024 * 2048, s = 512 * 512;
  EXPECT_EQ(load.staging_bytes, 4 * (w + s + 4096));
  EXPECT_EQ(load.bytes_in, 2 * (w + s + 4096));
  EXPECT_EQ(load.scratch_bytes, 2 * (2 * (w + s) + (w + 5 * 1024 * 1024) + (s + 2 * s)));
  // Two batches and a bit, each of two groups and a bit.
  const RunSpec large = Llama1B();
  const OwnerLoad all = PlanOf(large, options)->owners[0];
  const std::int64_t batch = std::int64_t{256} << 20;
  EXPECT_GT(all.scratch_bytes, 2 * 2 * batch);
  EXPECT_LT(all.scratch_bytes, 2 * 2 * batch + (std::int64_t{1} << 30));
}

TEST(PlanMemory, TiesHaveOneStateAndSumsStageEveryName) {
  RunSpec run = RunOf({Tensor("a", {512, 512}), Tensor("b", {512, 512})});
  run.parameters[0].tie = run.parameters[1].tie = "t";
  const std::int64_t n = 512 * 512;
  OwnerLoad load = PlanOf(run, Daemons(1))->owners[0];
  EXPECT_EQ(load.state_bytes, 8 * n);
  EXPECT_EQ(load.staging_bytes, 2 * 4 * n);
  EXPECT_EQ(load.bytes_out, 4 * n);
  for (ParameterSpec& spec : run.parameters) spec.tie_reduction = TieReduction::kSame;
  load = PlanOf(run, Daemons(1))->owners[0];
  EXPECT_EQ(load.staging_bytes, 4 * n);
}

TEST(PlanMemory, ReplicasComeFromEveryRank) {
  RunSpec run = RunOf({Tensor("a", {512, 512}), Tensor("b", {512, 512})});
  run.world_size = 8;
  run.parameters[1].replicated = true;
  const OwnerLoad load = PlanOf(run, Daemons(1))->owners[0];
  EXPECT_EQ(load.bytes_in, 4 * 512 * 512 * (1 + 8));
  EXPECT_EQ(load.staging_bytes, 4 * 512 * 512 * 2);
}

TEST(PlanMemory, LimitIsKeptWhereItBinds) {
  const RunSpec run = Llama1B();
  // Without a limit the two owners have the same; the tightest limit that works is not far off.
  const Plan free = PlanOf(run, Daemons(2)).value();
  const std::int64_t least = (free.owners[0].MemoryBytes() + free.owners[1].MemoryBytes()) / 2;
  PlanOptions options = Daemons(2);
  for (const std::int64_t extra : {1, 2, 8, 64, 1024}) {
    options.memory_max_bytes = least + extra * kMiB;
    const absl::StatusOr<Plan> plan = PlanOf(run, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ExpectSound(run, options, *plan);
  }
  options.memory_max_bytes = least - 8 * kMiB;
  EXPECT_STATUS(PlanOf(run, options), absl::IsResourceExhausted, "parameter \"embed\": plan: ");
}

TEST(PlanMemory, RandomRunsFitTheirLimitOrNameTheParameter) {
  std::mt19937_64 random(11);
  int fits = 0, refused = 0;
  for (int i = 0; i < 300; ++i) {
    const RunSpec run = RandomRun(random, 1 + static_cast<int>(random() % 30));
    PlanOptions options = Daemons(1 + static_cast<int>(random() % 6));
    const Plan free = PlanOf(run, options).value();
    std::int64_t total = 0;
    for (const OwnerLoad& owner : free.owners) total += owner.MemoryBytes();
    options.memory_max_bytes =
        1 + total / static_cast<std::int64_t>(free.owners.size()) * (80 + random() % 60) / 100;
    const absl::StatusOr<Plan> plan = PlanOf(run, options);
    if (plan.ok()) {
      ++fits;
      ExpectSound(run, options, *plan);
    } else {
      ++refused;
      EXPECT_STATUS(plan, absl::IsResourceExhausted, "parameter \"p");
    }
  }
  EXPECT_GT(fits, 50);
  EXPECT_GT(refused, 50);
}

TEST(PlanMemory, LevelsMemoryWhereLevelWorkDoesNotFit) {
  // The squares are the most work and come first, one to each owner; then no owner has room left
  // for the long one, which fits beside neither.
  const RunSpec run =
      RunOf({Tensor("a", {1024, 1024}), Tensor("b", {1024, 1024}), Tensor("long", {131072, 64})});
  PlanOptions options = Daemons(2);
  const Plan free = PlanOf(run, options).value();
  EXPECT_NE(free.ShardsOf(0)[0].owner, free.ShardsOf(1)[0].owner);
  options.memory_max_bytes = 195 * kMiB;
  const absl::StatusOr<Plan> plan = PlanOf(run, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->ShardsOf(0)[0].owner, plan->ShardsOf(1)[0].owner);
  ExpectSound(run, options, *plan);
}

TEST(PlanMemory, SaysWhichMatrixFindsNoOwner) {
  PlanOptions options = Daemons(4);
  options.memory_max_bytes = kMiB;
  EXPECT_STATUS(PlanOf(RunOf({Tensor("small", {8, 8}), Tensor("big", {1024, 1024})}), options),
                absl::IsResourceExhausted,
                "parameter \"big\": plan: a matrix needs 41943040 bytes, the memory limit is "
                "1048576 bytes for each of 4 owners and at most 1048576 are left on one");
}

TEST(PlanMemory, CutsBelowTheLeastPieceOnlyForALimit) {
  const std::int64_t elements = 3 * kShardElementsMin / 2;
  const RunSpec run = RunOf({Tensor("embed", {elements}, Role::kEmbedding)});
  PlanOptions options = Daemons(3);
  EXPECT_EQ(PlanOf(run, options)->shards.size(), 1);
  options.memory_max_bytes = 2 * 16 * std::int64_t{kernels::kBlockElements};
  const Plan plan = PlanOf(run, options).value();
  EXPECT_EQ(plan.shards.size(), 3);
  ExpectSound(run, options, plan);
}

}  // namespace
}  // namespace muond
