#include "server/engine/engines.h"

#include <cstring>
#include <future>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/device_like_backend.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t kBlock = kernels::kBlockElements;

// A run of a vector of three blocks, which two devices share: the middle block lies on the second.
// And a small one, on the second alone.
class EnginesTest : public ::testing::Test {
 protected:
  EnginesTest() {
    spec_.name = "run";
    spec_.groups = {{.name = "all", .algorithm = Algorithm::kAdamW}};
    spec_.parameters = {{.name = "v", .shape = Dims{3 * kBlock}, .group = "all"},
                        {.name = "b", .shape = Dims{2}, .group = "all"}};
    routing_ = *RouteParameters(spec_);
    const LocalShards shards = {
        {{.parameter = 0, .first = 0, .elements = kBlock, .owner = 0},
         {.parameter = 0, .first = kBlock, .elements = kBlock, .owner = 1},
         {.parameter = 0, .first = 2 * kBlock, .elements = kBlock, .owner = 0}},
        {{.parameter = 1, .first = 0, .elements = 2, .owner = 1}}};
    std::vector<EngineDevice> devices;
    for (int i = 0; i < 2; ++i) {
      backends_.push_back(testing::MakeDeviceLikeBackend(kernels::MakeReferenceBackend()));
      executors_.push_back(std::make_unique<Executor>());
      devices.push_back({backends_[i].get(), executors_[i].get()});
    }
    auto engines =
        Engines::Create(devices, spec_, routing_, shards, {&points_, nullptr}, false, owner_);
    EXPECT_TRUE(engines.ok()) << engines.status();
    engines_ = *std::move(engines);
  }
  ~EnginesTest() override { StopAll(executors_); }

  std::shared_ptr<StagingBuffer> Staged(int state, const std::vector<float>& values) {
    auto memory = *engines_->AllocateStaging(state, std::ssize(values), Dtype::kF32);
    std::memcpy(memory->data(), values.data(), values.size() * sizeof(float));
    return memory;
  }
  ReduceRequest Request(int state, const std::vector<float>& values, double divisor = 1) {
    return {state, {{Staged(state, values), Dtype::kF32}}, divisor};
  }
  // The three blocks, each of one value.
  static std::vector<float> Blocks(float a, float b, float c) {
    std::vector<float> values(kBlock, a);
    values.resize(2 * kBlock, b);
    values.resize(3 * kBlock, c);
    return values;
  }

  std::future<absl::StatusOr<ReducedGradient>> Reduce(ReduceRequest request) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<ReducedGradient>>>();
    engines_->Reduce(std::move(request),
                     [promise](ReduceRequest, const absl::StatusOr<ReducedGradient>& result) {
                       promise->set_value(result);
                     });
    return promise->get_future();
  }
  absl::StatusOr<Committed> Commit() {
    std::promise<absl::StatusOr<Committed>> promise;
    engines_->Commit(
        {.muon = {{"all", spec_.groups[0].muon}}, .adamw = {{"all", spec_.groups[0].adamw}}},
        [&](const absl::StatusOr<Committed>& result) { promise.set_value(result); });
    return promise.get_future().get();
  }
  std::vector<float> Read(int state, const ElementRange& range) {
    std::vector<float> values(range.count, -1);
    std::promise<absl::Status> promise;
    engines_->Read(
        state, WholeBox(*spec_.parameters[state].shape), range, Dtype::kF32, values.data(),
        [] { return absl::OkStatus(); },
        [&](const absl::Status& status) { promise.set_value(status); });
    EXPECT_TRUE(promise.get_future().get().ok());
    return values;
  }
  absl::Status WriteInitial(int state, const std::vector<float>& values) {
    std::promise<absl::Status> promise;
    engines_->WriteInitial(state, WholeBox(*spec_.parameters[state].shape), Staged(state, values),
                           Dtype::kF32,
                           [&](const absl::Status& status) { promise.set_value(status); });
    return promise.get_future().get();
  }
  std::vector<ShardHashes> Hashes() {
    std::promise<absl::StatusOr<std::vector<ShardHashes>>> promise;
    engines_->HashShards([&](absl::StatusOr<std::vector<ShardHashes>> hashes) {
      promise.set_value(std::move(hashes));
    });
    return *promise.get_future().get();
  }

  // Holds both devices up until the returned object goes.
  std::shared_ptr<void> HoldUp() {
    auto gate = std::make_shared<std::promise<void>>();
    const std::shared_future<void> open(gate->get_future());
    for (const auto& executor : executors_) executor->Post([open] { open.wait(); });
    return {nullptr, [gate](void*) { gate->set_value(); }};
  }

  RunSpec spec_;
  Routing routing_;
  FaultInjector points_;
  std::vector<std::unique_ptr<kernels::Backend>> backends_;
  std::shared_ptr<int> owner_ = std::make_shared<int>();
  std::unique_ptr<Engines> engines_;
  std::vector<std::unique_ptr<Executor>> executors_;
};

TEST_F(EnginesTest, AParameterOfTwoDevicesIsOne) {
  ASSERT_TRUE(WriteInitial(0, Blocks(1, 2, 3)).ok());
  ASSERT_TRUE(WriteInitial(1, {7, 8}).ok());
  EXPECT_THAT(Read(0, {kBlock - 1, 2}), ElementsAre(1, 2));
  EXPECT_THAT(Read(0, {2 * kBlock - 1, 2}), ElementsAre(2, 3));
  EXPECT_EQ(Read(0, {0, 3 * kBlock}), Blocks(1, 2, 3));
  EXPECT_THAT(Read(1, {1, 1}), ElementsAre(8));
  EXPECT_EQ(engines_->state_bytes(), (3 * kBlock + 2) * 12);
  EXPECT_EQ(engines_->PackedElements(0), 3 * kBlock);

  const auto reduced = Reduce(Request(0, Blocks(2, 4, 6), 2)).get();
  ASSERT_TRUE(reduced.ok());
  EXPECT_EQ(reduced->max_abs, 3);
  EXPECT_THAT(reduced->block_sums,
              ::testing::UnorderedElementsAre(1.0 * kBlock, 4.0 * kBlock, 9.0 * kBlock));
  EXPECT_TRUE(reduced->layers_free);
}

// What is hashed where it lies, shard by shard, is what a single engine hashes.
TEST_F(EnginesTest, DigestsDontShowTheDevices) {
  ASSERT_TRUE(WriteInitial(0, Blocks(1, 2, 3)).ok());
  ASSERT_TRUE(WriteInitial(1, {7, 8}).ok());
  auto whole = *Engine::Create(*backends_[0], spec_, routing_, WholeRun(routing_), 0, {});
  const Box box = WholeBox({3 * kBlock});
  ASSERT_TRUE(whole->WriteInitial(0, box, Staged(0, Blocks(1, 2, 3))->data(), Dtype::kF32).ok());
  ASSERT_TRUE(whole->WriteInitial(1, WholeBox({2}), Staged(1, {7, 8})->data(), Dtype::kF32).ok());
  EXPECT_EQ(TensorDigest(spec_, Hashes()), TensorDigest(spec_, *whole->HashShards()));
  EXPECT_EQ(ParameterDigests(spec_, Hashes()), ParameterDigests(spec_, *whole->HashShards()));
  EXPECT_EQ(Hashes().size(), 4u);
}

// A gradient that comes after a Discard must not be thrown away by it, however the queue looks.
TEST_F(EnginesTest, ReductionsJoinAJobThatWaitsButNeverPassADiscard) {
  std::vector<std::future<absl::StatusOr<ReducedGradient>>> results;
  {
    const auto hold = HoldUp();
    const std::uint64_t before = executors_[1]->posted();
    results.push_back(Reduce(Request(0, Blocks(9, 9, 9))));
    results.push_back(Reduce(Request(1, {9, 9})));
    EXPECT_EQ(executors_[1]->posted(), before + 1) << "two reductions, one job";
    engines_->Discard();
    results.push_back(Reduce(Request(0, Blocks(1, 1, 1))));
    results.push_back(Reduce(Request(1, {1, 1})));
    EXPECT_EQ(executors_[1]->posted(), before + 3);
  }
  for (auto& result : results) ASSERT_TRUE(result.get().ok());
  const auto committed = Commit();  // checks that every gradient is there
  ASSERT_TRUE(committed.ok()) << committed.status();
  const Hyperparameters& adamw = spec_.groups[0].adamw;
  const float expected = static_cast<float>(-adamw.lr / (1 + adamw.eps));
  EXPECT_NEAR(Read(0, {kBlock, 1})[0], expected, 1e-9);
  EXPECT_NEAR(Read(1, {0, 1})[0], expected, 1e-9);
}

TEST_F(EnginesTest, AFailureOfOneDeviceIsTheAnswer) {
  ASSERT_TRUE(points_.ArmFromSpec("fail_reduce").ok());
  const auto reduced = Reduce(Request(0, Blocks(1, 1, 1))).get();
  EXPECT_FALSE(reduced.ok());
  EXPECT_THAT(std::string(reduced.status().message()), HasSubstr("parameter \"v\""));
}

TEST_F(EnginesTest, ResetForgetsEverything) {
  ASSERT_TRUE(WriteInitial(0, Blocks(0, 0, 0)).ok());
  ASSERT_TRUE(WriteInitial(1, {0, 0}).ok());
  const std::string before = TensorDigest(spec_, Hashes());
  ASSERT_TRUE(Reduce(Request(0, Blocks(1, 2, 3))).get().ok());
  ASSERT_TRUE(Reduce(Request(1, {1, 2})).get().ok());
  ASSERT_TRUE(Commit().ok());
  EXPECT_NE(TensorDigest(spec_, Hashes()), before);
  std::promise<absl::Status> done;
  engines_->Reset([&](const absl::Status& status) { done.set_value(status); });
  ASSERT_TRUE(done.get_future().get().ok());
  EXPECT_EQ(TensorDigest(spec_, Hashes()), before);
}

TEST(Executor, AllEndTogether) {
  std::vector<std::unique_ptr<Executor>> executors;
  for (int i = 0; i < 3; ++i) executors.push_back(std::make_unique<Executor>());
  std::atomic<int> ran{0};
  // Each job hands on to the next executor, round and round.
  std::function<void(int)> hand_on = [&](int left) {
    ++ran;
    if (left > 0) executors[left % 3]->Post([&, left] { hand_on(left - 1); });
  };
  executors[0]->Post([&] { hand_on(300); });
  StopAll(executors);
  EXPECT_EQ(ran, 301);
}

}  // namespace
}  // namespace muond
