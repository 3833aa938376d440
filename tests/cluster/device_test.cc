// Runs whose state lies in memory that the host can't touch, on one device and on several: the same
// bits as on the host, and refusals before anything is taken.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/device_like_backend.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using muond::testing::DeviceLikeOptions;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

// A service of `devices` devices; none: the cpu backend as it is.
std::unique_ptr<Service> StartOn(int devices, DeviceLikeOptions device = {}) {
  ServiceOptions options{.threads = 1};
  if (devices == 0) return StartService(options);
  options.make_backends = [devices, device](const kernels::BackendOptions& made) {
    std::vector<std::unique_ptr<kernels::Backend>> backends;
    for (int i = 0; i < devices; ++i) {
      backends.push_back(
          muond::testing::MakeDeviceLikeBackend(kernels::MakeCpuBackend(made), device));
    }
    return backends;
  };
  return StartService(options);
}

// Everything that has a way of its own through an engine: plain matrices, a stack of experts and an
// embedding that a plan cuts into shards, a fused matrix whose rows are gathered, a replicated
// parameter, a tie, a parameter without elements.
RunSpec Everything() {
  ParameterSpec experts = Matrix("experts", 1, 1);
  experts.shape = Dims{4, 256, 256};
  experts.kind = Kind::kExperts;
  ParameterSpec fused = Matrix("qkv", 24, 10);
  fused.split = {.sizes = {2, 1, 1}, .groups = 6, .interleaved = true};
  ParameterSpec embedding = Vector("embedding", 1);
  embedding.shape = Dims{2500, 300};
  embedding.kind = Kind::kMatrix;
  embedding.role = Role::kEmbedding;
  ParameterSpec norm = Vector("norm", 77);
  norm.replicated = true;
  ParameterSpec empty = Vector("empty", 0);
  empty.allow_empty = true;
  RunSpec spec = SpecOf({Matrix("wide", 20, 50), experts, fused, Matrix("tall", 60, 8), embedding,
                         norm, Vector("bias", 5), empty},
                        2);
  spec.reduce_micro_batches = Reduction::kMean;
  spec.parameters[0].dtype = Dtype::kBF16;
  spec.parameters[3].dtype = Dtype::kF16;
  return spec;
}

struct Story {
  std::vector<std::string> digests;
  Tensors pulled, weights;
  std::map<std::string, std::string> by_parameter;
};

// Three steps with two micro-batches, a skipped one among them, and one with a parameter absent.
Story Live(Service& service, Cut cut) {
  TestRun run(service, Everything(), {.cut = cut});
  Story story{.digests = {run.TensorDigest()}};
  for (const std::uint64_t step : {1, 2, 3, 4}) {
    std::vector<std::vector<Tensors>> gradients;
    for (const std::uint64_t rank : {0, 1}) {
      gradients.push_back({NoiseFor(run.spec(), 100 * step + 10 * rank),
                           NoiseFor(run.spec(), 100 * step + 10 * rank + 1)});
    }
    if (step == 2) gradients[1][1].at("norm")[3] = INFINITY;
    if (step == 3) {
      for (auto& rank : gradients) {
        for (Tensors& micro_batch : rank) micro_batch.erase("tall");
      }
    }
    const StepOutcome outcome = run.Step(StepInput{.gradients = gradients});
    EXPECT_EQ(outcome.applied, step != 2) << step;
    story.digests.push_back(run.TensorDigest());
  }
  EXPECT_EQ(story.digests[1], story.digests[2]) << "a skipped step changes nothing";
  story.pulled = run.Pulled();
  story.weights = run.Weights();
  const v1::DigestReply digests = run.Digest(true);
  for (const auto& [name, digest] : digests.parameters()) story.by_parameter[name] = digest;
  EXPECT_EQ(run.Describe("experts").t(), 3);
  EXPECT_EQ(run.Describe("tall").t(), 2);
  return story;
}

class Devices : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, Devices, ::testing::Values(1, 2, 3));

TEST_P(Devices, DeepSpeed8464_GiveTheBitsOfTheHost) {
  for (const Cut cut : {Cut{Cut::kFlat, 3}, Cut{Cut::kCols, 1}}) {
    const auto host = StartOn(0), device = StartOn(GetParam());
    const Story expected = Live(*host, cut), found = Live(*device, cut);
    EXPECT_EQ(found.digests, expected.digests);
    EXPECT_EQ(found.by_parameter, expected.by_parameter);
    EXPECT_EQ(found.pulled, expected.pulled);
    EXPECT_EQ(found.weights, expected.weights);
  }
}

TEST_P(Devices, MetricsAndStatusAreThoseOfAll) {
  const auto host = StartOn(0), device = StartOn(GetParam());
  double expected_norm = 0;
  for (Service* service : {host.get(), device.get()}) {
    TestRun run(*service, Everything());
    EXPECT_EQ(run.Step(StepInput{.gradients = {{NoiseFor(run.spec(), 7)}}}).newton_schulz_calls,
              1 + 4 + 3 + 1);
    const v1::RunStatus status = run.Status();
    if (service == host.get()) {
      expected_norm = status.momentum_norm();
      continue;
    }
    EXPECT_NEAR(status.momentum_norm(), expected_norm, 1e-9 * expected_norm);
    EXPECT_EQ(status.newton_schulz_calls(), 9);
  }
}

// A broken matrix on one device stops the run, whatever the others make of it.
TEST_P(Devices, AFailureOfOneStopsTheRun) {
  ServiceOptions options{.threads = 1, .fault_points = "fail_commit"};
  const int devices = GetParam();
  options.make_backends = [devices](const kernels::BackendOptions& made) {
    std::vector<std::unique_ptr<kernels::Backend>> backends;
    for (int i = 0; i < devices; ++i) {
      backends.push_back(muond::testing::MakeDeviceLikeBackend(kernels::MakeCpuBackend(made)));
    }
    return backends;
  };
  const auto service = StartService(options);
  TestRun run(*service, SpecOf({Matrix("a", 8, 8), Matrix("b", 8, 8), Matrix("c", 8, 8)}));
  const auto outcomes = run.TryStep(StepInput{.gradients = {{NoiseFor(run.spec(), 3)}}});
  EXPECT_FALSE(outcomes[0].ok());
  EXPECT_THAT(run.Status().failure(), HasSubstr("injected fault"));
}

// ---- 16-bit Newton-Schulz ---------------------------------------------------------------------

class HalfPrecision : public ::testing::Test {
 protected:
  // W = I, lr = weight decay = 0.1: O is off by 2^-11 of itself at most.
  static constexpr float kTolerance = 1e-4f;
  std::unique_ptr<Service> service_ = StartOn(1, {.iterate = Dtype::kF16});
};

TEST_F(HalfPrecision, FollowsTheGoldenTrajectory) {
  TestRun run(*service_, SpecOf({Matrix("w", 2, 2)}), {.initial = {{"w", {1, 0, 0, 1}}}});
  const Floats gradients[] = {{3, 0, 0, 4}, {1, 0, 0, 1}, {0, 0, 0, 0}};
  const Floats expected[] = {
      {.9177124f, 0, 0, .8780796f}, {.8088734f, 0, 0, .7635475f}, {.7138857f, 0, 0, .6478689f}};
  for (int step = 0; step < 3; ++step) {
    run.Step({{"w", gradients[step]}});
    EXPECT_THAT(run.Weights().at("w"), Pointwise(FloatNear(kTolerance), expected[step])) << step;
  }
}

// Beyond fp16's range in both directions: U is stored times a power of two that suits it.
TEST_F(HalfPrecision, NoMagnitudeOfAGradientIsTooLargeOrTooSmall) {
  int runs = 0;
  for (const float scale : {1e-38f, 1e-30f, 1e-6f, 1.0f, 70000.0f, 1e30f, 5e37f}) {
    RunSpec spec = SpecOf({Matrix("w", 2, 2)});
    spec.name = "scale-" + std::to_string(runs++);
    TestRun run(*service_, spec, {.initial = {{"w", {1, 0, 0, 1}}}});
    const StepOutcome outcome = run.Step({{"w", {3 * scale, 0, 0, 4 * scale}}});
    ASSERT_TRUE(outcome.applied) << scale;
    EXPECT_EQ(outcome.newton_schulz_fallbacks, 0);
    EXPECT_THAT(run.Weights().at("w"),
                Pointwise(FloatNear(kTolerance), Floats{.9177124f, 0, 0, .8780796f}))
        << scale;
  }
}

TEST_F(HalfPrecision, ASkippedStepChangesNoByte) {
  TestRun run(*service_, Everything());
  run.Step(StepInput{.gradients = {{NoiseFor(run.spec(), 5)}}});
  const std::string before = run.TensorDigest();
  Tensors bad = NoiseFor(run.spec(), 6);
  bad.at("qkv")[17] = NAN;
  EXPECT_EQ(run.Step(StepInput{.gradients = {{bad}}}).cause, SkipCause::kOverflow);
  EXPECT_EQ(run.TensorDigest(), before);
}

// ---- Memory -----------------------------------------------------------------------------------

TEST(DeviceMemory, ARunThatDoesNotFitIsRefusedAndNothingIsKept) {
  const auto service = StartOn(1, {.memory_bytes = std::size_t{128} << 20});
  RunSpec large = SpecOf({Matrix("w", 4096, 4096)});  // 64 MiB each of weights, momentum, gradient
  large.name = "large";
  const auto refused =
      client::Session::Open(large, 0, CutOf(large, {}, 0), {.channel = service->channel()});
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  const std::string message(refused.status().message());
  EXPECT_THAT(message, HasSubstr("run \"large\": needs "));
  EXPECT_THAT(message, HasSubstr("(134217728 of state, 67108864 of gradients, "));
  EXPECT_THAT(message, HasSubstr("has 134217728 free"));
  // The whole of the device is there for another run, and again once that is closed.
  for (const char* name : {"small", "again"}) {
    RunSpec small = SpecOf({Matrix("w", 1024, 1024)});
    small.name = name;
    TestRun run(*service, small);
    EXPECT_TRUE(run.Step({{"w", Noise(1 << 20, 4)}}).applied);
    Must(run.session().Close());
  }
}

}  // namespace
}  // namespace muond::cluster
