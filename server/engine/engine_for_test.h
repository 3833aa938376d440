// A small engine, as its tests use it.
#pragma once

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/support/device_like_backend.h"

namespace muond {

// An engine with a 2 x 2 Muon matrix "w" and an AdamW vector "b" of three elements, in the host's
// memory and in a device's.
class EngineTest : public ::testing::TestWithParam<bool> {
 protected:
  EngineTest() : backend_(Placed(kernels::MakeReferenceBackend())) {
    spec_.name = "run";
    GroupSpec group{.name = "all"};
    group.muon = {.lr = 0.1, .weight_decay = 0.1, .momentum = 0.95};
    group.adamw = {.lr = 0.1, .weight_decay = 0.01};
    spec_.groups = {group};
    spec_.parameters = {{.name = "w", .shape = Dims{2, 2}, .group = "all", .role = Role::kHidden},
                        {.name = "b", .shape = Dims{3}, .group = "all", .role = Role::kBias}};
    routing_ = *RouteParameters(spec_);
  }

  static std::unique_ptr<kernels::Backend> Placed(std::unique_ptr<kernels::Backend> backend) {
    if (!GetParam()) return backend;
    return testing::MakeDeviceLikeBackend(std::move(backend));
  }

  // Values as they come in.
  std::shared_ptr<StagingBuffer> Staged(const std::vector<float>& values) {
    auto memory = *engine_->AllocateStaging(values.size(), Dtype::kF32);
    std::memcpy(memory->data(), values.data(), values.size() * sizeof(float));
    return memory;
  }
  absl::Status WriteInitial(int state, const Box& box, const std::vector<float>& values) {
    return engine_->WriteInitial(state, box, Staged(values)->data(), Dtype::kF32);
  }

  void Make(bool overlap = false) {
    auto engine = Engine::Create(*backend_, spec_, routing_, WholeRun(routing_), 0,
                                 {&points_, &fault_}, overlap);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(WriteInitial(0, WholeBox({2, 2}), {1, 0, 0, 1}).ok());
    ASSERT_TRUE(WriteInitial(1, WholeBox({3}), {1, 1, 1}).ok());
    for (int more = 2; more < std::ssize(spec_.parameters); ++more) {
      ASSERT_TRUE(WriteInitial(more, WholeBox({2, 2}), {1, 0, 0, 1}).ok());
    }
    ASSERT_TRUE(engine_->FinishInitial().ok());
  }

  GradientLayer Layer(const std::vector<float>& values) { return {Staged(values), Dtype::kF32}; }
  ReducedGradient Reduce(int state, const std::vector<float>& values, double divisor = 1) {
    return Reduce({{state, {Layer(values)}, divisor}})[0];
  }
  std::vector<ReducedGradient> Reduce(const std::vector<ReduceRequest>& requests) {
    auto reduced = engine_->Reduce(requests);
    EXPECT_TRUE(reduced.ok()) << reduced.status();
    return reduced.ok() ? *reduced : std::vector<ReducedGradient>(requests.size());
  }
  std::string Digest() { return TensorDigest(spec_, *engine_->HashShards()); }
  std::string Digest(const std::string& parameter) {
    return ParameterDigests(spec_, *engine_->HashShards()).at(parameter);
  }

  CommitRequest Request(std::set<int> absent = {}) const {
    return {.absent = std::move(absent),
            .muon = {{"all", spec_.groups[0].muon}},
            .adamw = {{"all", spec_.groups[0].adamw}}};
  }

  std::vector<float> Weights(int state, std::int64_t count) {
    std::vector<float> values(count);
    EXPECT_TRUE(engine_
                    ->Read(state, WholeBox(*spec_.parameters[state].shape), 0, count, Dtype::kF32,
                           values.data())
                    .ok());
    return values;
  }

  std::unique_ptr<kernels::Backend> backend_;
  RunSpec spec_;
  Routing routing_;
  FaultInjector points_;
  kernels::NewtonSchulzFault fault_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace muond
