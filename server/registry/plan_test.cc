#include "server/registry/plan.h"

#include <chrono>

#include "server/registry/plan_for_test.h"

namespace muond {
namespace {

using testing::HasSubstr;

TEST(Plan, OneOwnerHoldsEveryStateWhole) {
  const RunSpec run = Llama1B();
  const Plan plan = PlanOf(run, Daemons(1)).value();
  ASSERT_EQ(plan.shards.size(), run.parameters.size());
  ExpectSound(run, Daemons(1), plan);
  EXPECT_EQ(plan.imbalance_over_floor, 1);
  EXPECT_FALSE(plan.split.helps);
}

TEST(Plan, RandomRunsAreCoveredExactly) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    const RunSpec run = RandomRun(random, 1 + static_cast<int>(random() % 40));
    PlanOptions options;
    options.devices_per_daemon.resize(1 + random() % 9);
    for (int& devices : options.devices_per_daemon) devices = 1 + static_cast<int>(random() % 3);
    const absl::StatusOr<Plan> plan = PlanOf(run, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ExpectSound(run, options, *plan);
    EXPECT_EQ(PlanOf(run, options)->hash, plan->hash);
  }
}

// Padding shards to a full one made the work grow with the world.
TEST(Plan, Dion96_TheWorkDoesNotDependOnTheNumberOfDaemons) {
  const RunSpec run = Llama1B();
  const double alone = PlanOf(run, Daemons(1))->total_flops;
  for (const int daemons : {2, 8, 64}) {
    EXPECT_EQ(PlanOf(run, Daemons(daemons))->total_flops, alone) << daemons;
  }
}

struct ModelCase {
  const char* name;
  RunSpec (*run)();
  double step_tflop;  // all matrices, five iterations
};

class PlanOfLlama : public testing::TestWithParam<ModelCase> {};

TEST_P(PlanOfLlama, IsWithinFivePercentOfTheFloor) {
  const RunSpec run = GetParam().run();
  double last_floor = 0, last_largest = 0;
  for (const int daemons : {1, 2, 4, 8, 16, 32, 64}) {
    const Plan plan = PlanOf(run, Daemons(daemons)).value();
    ExpectSound(run, Daemons(daemons), plan);
    EXPECT_LE(plan.imbalance_over_floor, 1.05) << daemons;
    EXPECT_NEAR(plan.total_flops / 1e12, GetParam().step_tflop, GetParam().step_tflop * 0.01);
    if (daemons > 1) {
      EXPECT_LE(plan.floor_flops, last_floor) << daemons;
      EXPECT_LE(plan.largest_flops, last_largest) << daemons;
    }
    last_floor = plan.floor_flops;
    last_largest = plan.largest_flops;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PlanOfLlama,
                         testing::Values(ModelCase{"B1", &Llama1B, 45.7},
                                         ModelCase{"B7", &Llama7B, 684},
                                         ModelCase{"B70", &Llama70B, 13223}),
                         [](const auto& test) { return test.param.name; });

TEST(Plan, LevelsBytesByAdamW) {
  // 64 daemons have 48 large matrices: the 16 that have none take more of the embedding.
  for (const int daemons : {2, 3, 4, 7, 8, 16}) {
    const RunSpec run = Llama1B();
    const Plan plan = PlanOf(run, Daemons(daemons)).value();
    std::int64_t low = INT64_MAX, high = 0;
    for (const OwnerLoad& owner : plan.owners) {
      const std::int64_t level = owner.state_bytes + owner.bytes_in + owner.bytes_out;
      low = std::min(low, level);
      high = std::max(high, level);
    }
    EXPECT_LE(high - low, 2 * kShardElementsMin * 20) << daemons << " daemons";
  }
}

TEST(Plan, CutsAdamWIntoPiecesOfTheLeastSizeOrMore) {
  const RunSpec run = Llama1B();
  for (const int daemons : {2, 5, 64, 300, 1000, 5000}) {
    const Plan plan = PlanOf(run, Daemons(daemons)).value();
    ExpectSound(run, Daemons(daemons), plan);
    ASSERT_GT(plan.ShardsOf(0).size(), 1);
    for (const Shard& shard : plan.ShardsOf(0)) EXPECT_GE(shard.elements, kShardElementsMin);
    EXPECT_EQ(plan.ShardsOf(1).size(), 1) << "a norm stays whole";
  }
}

TEST(Plan, DealsAStackOutInRuns) {
  const RunSpec run = RunOf({Tensor("experts", {128, 512, 256}, Role::kHidden, Kind::kExperts)});
  const Plan plan = PlanOf(run, Daemons(8)).value();
  ASSERT_EQ(plan.shards.size(), 8);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(plan.shards[i], (Shard{0, i * 16 * 512 * 256, 16 * 512 * 256, i}));
    EXPECT_EQ(plan.owners[i].matrices, 16);
  }
  EXPECT_EQ(plan.imbalance_over_floor, 1);
}

TEST(Plan, KeepsAStackTogetherWhereItsMatricesAreNoMultipleOfBlocks) {
  const RunSpec run = RunOf({Tensor("experts", {128, 512, 200}, Role::kHidden, Kind::kExperts)});
  const Plan plan = PlanOf(run, Daemons(8)).value();
  ASSERT_EQ(plan.shards.size(), 1);
  EXPECT_EQ(plan.owners[0].matrices, 128);
  EXPECT_EQ(plan.floor_flops, plan.total_flops) << "what can't be parted is one";
}

TEST(Plan, SpreadsASplitOnlyWhereItsBlocksAreContiguous) {
  RunSpec run = RunOf({Tensor("qkv", {3 * 512, 512})});
  RowSplit& split = run.parameters[0].split;
  split = {.sizes = {512, 512, 512}};
  EXPECT_EQ(PlanOf(run, Daemons(3))->shards.size(), 3);
  split = {.sizes = {128, 128, 128}, .groups = 4, .interleaved = true};
  EXPECT_EQ(PlanOf(run, Daemons(3))->shards.size(), 1) << "rows of a block lie apart";
  split.per_head = true;
  const Plan plan = PlanOf(run, Daemons(3)).value();
  EXPECT_EQ(plan.shards.size(), 3) << "each head is contiguous";
  ExpectSound(run, Daemons(3), plan);
}

TEST(Plan, MatricesOfAShardCountRowsFromItsBeginning) {
  RunSpec run = RunOf({Tensor("qkv", {3 * 512, 512})});
  run.parameters[0].split = {.sizes = {512, 1024}};
  const Routing routing = RouteParameters(run).value();
  const std::vector<MatrixBlock> second =
      MatricesIn(routing.parameters[0], {.first = 512 * 512, .elements = 1024 * 512});
  ASSERT_EQ(second.size(), 1);
  EXPECT_EQ(second[0], (MatrixBlock{1024, 512, {{0, 1024}}}));
}

TEST(Plan, MoreOwnersThanMatrices) {
  const RunSpec run = RunOf({Tensor("a", {512, 512}), Tensor("b", {512, 512})});
  const Plan plan = PlanOf(run, Daemons(5)).value();
  ExpectSound(run, Daemons(5), plan);
  EXPECT_EQ(plan.ShardsOf(0)[0].owner, 0);
  EXPECT_EQ(plan.ShardsOf(1)[0].owner, 1);
  EXPECT_EQ(plan.floor_flops, plan.largest_matrix_flops);
  EXPECT_TRUE(plan.split.helps);
  EXPECT_NEAR(plan.split.gain, 0.6, 1e-12);
}

TEST(Plan, OneParameter) {
  const RunSpec matrix = RunOf({Tensor("w", {64, 64})});
  const RunSpec vector = RunOf({Tensor("b", {64})});
  for (const int daemons : {1, 2, 64}) {
    EXPECT_EQ(PlanOf(matrix, Daemons(daemons))->shards, (std::vector<Shard>{{0, 0, 4096, 0}}));
    const Plan plan = PlanOf(vector, Daemons(daemons)).value();
    EXPECT_EQ(plan.shards, (std::vector<Shard>{{0, 0, 64, 0}}));
    EXPECT_EQ(plan.imbalance_over_floor, 1);
    EXPECT_EQ(plan.split.reason, "there is no matrix");
  }
}

TEST(Plan, EqualMatricesGoToAllDaemonsBeforeToSecondDevices) {
  const RunSpec run = RunOf({Tensor("a", {64, 64}), Tensor("b", {64, 64}), Tensor("c", {64, 64})});
  PlanOptions options;
  options.devices_per_daemon = {2, 1};
  const Plan plan = PlanOf(run, options).value();
  ASSERT_EQ(plan.owners.size(), 3);
  EXPECT_EQ(plan.owners[1].place, (PlanOwner{0, 1}));
  EXPECT_EQ(plan.owners[2].place, (PlanOwner{1, 0}));
  EXPECT_EQ(plan.ShardsOf(0)[0].owner, 0);
  EXPECT_EQ(plan.ShardsOf(1)[0].owner, 2);
  EXPECT_EQ(plan.ShardsOf(2)[0].owner, 1);
}

TEST(Plan, CountsTheIterationsOfEachGroup) {
  RunSpec run = RunOf({Tensor("a", {64, 64}), Tensor("b", {64, 64})});
  run.groups.push_back(GroupOf("long", Algorithm::kMuon));
  run.groups.back().coefficients = "deepseek_v4";
  run.parameters[1].group = "long";
  const Plan plan = PlanOf(run, Daemons(2)).value();
  EXPECT_EQ(plan.owners[0].flops, 10 * 6 * 64 * 64 * 64) << "the costliest first";
  EXPECT_EQ(plan.owners[1].flops, 5 * 6 * 64 * 64 * 64);
  run.groups.back().coefficients = "nonsense";
  EXPECT_STATUS(PlanOf(run, Daemons(2)), absl::IsInvalidArgument, "group \"long\"");
}

TEST(Plan, AdvisesToSplitWhereAMatrixIsMoreThanAShare) {
  const Plan even = PlanOf(Llama1B(), Daemons(16)).value();
  EXPECT_FALSE(even.split.helps);
  EXPECT_THAT(even.split.reason, HasSubstr("the work is level enough"));
  const Plan idle = PlanOf(Llama1B(), Daemons(64)).value();
  EXPECT_TRUE(idle.split.helps) << idle.split.reason;
  EXPECT_EQ(idle.split.count, 48);
  EXPECT_THAT(idle.split.reason, HasSubstr("48 matrices of 8192 x 2048, "));
  const Plan uneven = PlanOf(Llama1B(), Daemons(32)).value();
  EXPECT_FALSE(uneven.split.helps) << "no matrix is more than a share, and sides are 1 : 4";
  EXPECT_GT(uneven.split.gain, 0.05);
  // Three long matrices for two owners: a Gram matrix of 64 x 64 costs nothing to exchange.
  const Plan longs =
      PlanOf(RunOf({Tensor("a", {64, 4096}), Tensor("b", {64, 4096}), Tensor("c", {4096, 64})}),
             Daemons(2))
          .value();
  EXPECT_TRUE(longs.split.helps) << longs.split.reason;
  EXPECT_EQ(longs.split.gram_bytes, 2 * 2 * 64 * 64 * 4 / 2);
}

TEST(Plan, HashChangesWithOwnersAndShards) {
  const RunSpec run = Llama1B();
  const std::string hash = PlanOf(run, Daemons(4))->hash;
  EXPECT_NE(PlanOf(run, Daemons(5))->hash, hash);
  EXPECT_NE(PlanOf(run, Daemons(2, 2))->hash, hash) << "four owners, too, but elsewhere";
  RunSpec other = run;
  std::swap(other.parameters[2], other.parameters[3]);
  EXPECT_NE(PlanOf(other, Daemons(4))->hash, hash);
}

// Plans are compared between programs: a change of these is a change of the protocol.
TEST(Plan, HashesAreGolden) {
  EXPECT_EQ(PlanOf(Llama1B(), Daemons(1))->hash, "3677d8ab0ef9b0596fdef1194a8b071f");
  EXPECT_EQ(PlanOf(Llama1B(), Daemons(8))->hash, "bbdcdac5cc0a52750e2f1f4c703cc185");
  EXPECT_EQ(PlanOf(Llama70B(), Daemons(8, 8))->hash, "043898ad97098216650a724dda11a100");
}

TEST(Plan, RefusesWhatIsNoListOfDaemons) {
  const RunSpec run = RunOf({Tensor("w", {64, 64})});
  EXPECT_STATUS(PlanOf(run, Daemons(0)), absl::IsInvalidArgument, "no daemon");
  EXPECT_STATUS(PlanOf(run, Daemons(2, 0)), absl::IsInvalidArgument, "daemon 0: expected at least");
  EXPECT_STATUS(PlanOf(run, Daemons(2, kOwnersMax)), absl::IsResourceExhausted, "more than 65536");
  const RunSpec huge = RunOf({Tensor("w", {std::int64_t{1} << 30, std::int64_t{1} << 29})});
  EXPECT_STATUS(PlanOf(huge, Daemons(2)), absl::IsResourceExhausted, "more than can be counted");
}

// How long it takes is printed, not judged: the machine may be busy.
TEST(Plan, ManyParametersOnManyDaemons) {
  std::vector<ParameterSpec> list;
  for (int i = 0; i < 100'000; ++i) {
    const std::int64_t width = 256 * (1 + i % 7);
    list.push_back(i % 9 < 7 ? Tensor(absl::StrFormat("w%d", i), {width, 256 * (1 + i % 11)})
                             : Tensor(absl::StrFormat("b%d", i), {width}));
  }
  const RunSpec run = RunOf(std::move(list));
  const Routing routing = RouteParameters(run).value();
  PlanOptions options = Daemons(1024);
  const auto timed = [&] {
    const auto begin = std::chrono::steady_clock::now();
    const absl::StatusOr<Plan> plan = MakePlan(run, routing, options);
    EXPECT_TRUE(plan.ok()) << plan.status();
    std::cout << "100000 parameters x 1024 daemons: "
              << std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()
              << " s\n";
    return plan.value();
  };
  const Plan plan = timed();
  EXPECT_LE(plan.imbalance_over_floor, 1.001);
  for (const OwnerLoad& owner : plan.owners) {
    options.memory_max_bytes = std::max(options.memory_max_bytes, owner.MemoryBytes());
  }
  options.memory_max_bytes -= options.memory_max_bytes / 200;
  timed();
}

}  // namespace
}  // namespace muond
