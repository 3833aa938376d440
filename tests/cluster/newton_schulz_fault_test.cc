// A bad Newton-Schulz result never reaches a weight: it is redone, and if that fails the run stops.
#include <cmath>

#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

const std::vector<ParameterSpec> kParameters = {Matrix("a", 4, 6), Matrix("b", 5, 5),
                                                Vector("p", 3)};

TEST(NewtonSchulzFault, Dion76_ABadFastPathIsRedone) {
  const auto sound = StartService();
  const auto broken =
      StartService({.threads = 1, .fault_points = "newton_schulz_fast_path_nan:1:1"});
  const RunSpec spec = SpecOf(kParameters);
  TestRun expected(*sound, spec), run(*broken, spec);
  for (std::uint64_t step = 0; step < 2; ++step) {
    expected.Step(NoiseFor(spec, step));
    const StepOutcome outcome = run.Step(NoiseFor(spec, step));
    EXPECT_TRUE(outcome.applied);
    EXPECT_EQ(outcome.newton_schulz_calls, 2) << "a fallback does not count twice";
    EXPECT_EQ(outcome.newton_schulz_fallbacks, step == 0 ? 1 : 0);
  }
  const Tensors weights = run.Weights(), wanted = expected.Weights();
  for (const auto& [name, values] : wanted) {
    EXPECT_THAT(weights.at(name), ::testing::Pointwise(::testing::FloatNear(1e-5f), values))
        << name;
  }
  EXPECT_EQ(run.Status().newton_schulz_fallbacks(), 1);
  EXPECT_EQ(run.Status().newton_schulz_calls(), 4);
  EXPECT_EQ(run.Status().position().state(), v1::RUN_STATE_RUNNING);
}

TEST(NewtonSchulzFault, Dion76_ABrokenFallbackStopsTheRunLoudly) {
  const auto service = StartService(
      {.threads = 1,
       .fault_points = "newton_schulz_fast_path_nan:2:1,newton_schulz_fallback_nan:2:1"});
  const RunSpec spec = SpecOf(kParameters);
  TestRun run(*service, spec);
  ASSERT_TRUE(run.Step(NoiseFor(spec, 1)).applied);
  RawTrainer trainer(*service, "run");
  const auto outcome = run.TryStep({.gradients = {{NoiseFor(spec, 2)}}})[0];
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(outcome.status().message()),
              HasSubstr("Newton-Schulz of a 4 x 6 matrix"));
  const v1::RunStatus status = run.Status();
  EXPECT_EQ(status.position().state(), v1::RUN_STATE_FAILED);
  EXPECT_THAT(status.failure(), HasSubstr("parameter \"a\""));
  EXPECT_EQ(status.position().next_step(), 1) << "the step is not consumed";
  const absl::Status refused = trainer.Begin(1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("needs a restore"));
  // No weight holds a NaN, and the daemon serves others.
  EXPECT_TRUE(std::isfinite(run.Describe("a").weight_norm()));
  EXPECT_EQ(run.Describe("a").nonfinite_elements(), 0);
  // What was applied in part belongs to no version: nobody gets it as one.
  Floats p(3);
  const client::SliceSink sink{.parameter = "p", .data = p.data(), .elements = 3};
  const absl::Status pull = run.session().Pull(1, {&sink, 1});
  EXPECT_EQ(pull.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(pull.message()), HasSubstr("the run has failed"));
  RunSpec other = spec;
  other.name = "other";
  EXPECT_TRUE(TestRun(*service, other).Step(NoiseFor(spec, 3)).applied);
}

// With one matrix in the run, its failure once counted for more bad outcomes than there were calls.
TEST(NewtonSchulzFault, TheOnlyMatrixMayFailWithoutHarmToTheDaemon) {
  const auto service = StartService(
      {.threads = 1,
       .fault_points = "newton_schulz_fast_path_nan,newton_schulz_fallback_nan"});
  const RunSpec spec = SpecOf({Matrix("a", 4, 6)});
  TestRun run(*service, spec);
  const auto outcome = run.TryStep({.gradients = {{NoiseFor(spec, 1)}}})[0];
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(run.Status().newton_schulz_calls(), 0) << "no step was applied";
  const auto samples = ParseExposition(service->Metrics());
  EXPECT_EQ(samples.at("muond_newton_schulz_calls_total{group=\"muon\",run=\"run\"}"), 0);
  EXPECT_EQ(samples.at("muond_steps_total{outcome=\"failed\",run=\"run\"}"), 1);
}

TEST(NewtonSchulzFault, APullUnderWayEndsWhenItsRunFails) {
  const auto service = StartService({.threads = 1, .fault_points = "fail_commit"});
  const RunSpec spec = SpecOf({Matrix("a", 64, 64), Vector("p", 4096)});
  TestRun run(*service, spec);
  const auto stub = v1::Optimizer::NewStub(service->channel());
  grpc::ClientContext context;
  v1::PullRequest request;
  *request.mutable_id() = RawTrainer(*service, "run").id();
  request.set_chunk_bytes(1024);
  const auto stream = stub->Pull(&context, request);
  v1::PullReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(run.TryStep({.gradients = {{NoiseFor(spec, 1)}}})[0].status().code(),
            absl::StatusCode::kInternal);
  while (stream->Read(&reply)) {
  }
  const grpc::Status status = stream->Finish();
  // A read within the commit, before it failed, is refused since values are about to change.
  EXPECT_THAT(status.error_code(), ::testing::AnyOf(grpc::StatusCode::FAILED_PRECONDITION,
                                                    grpc::StatusCode::ABORTED))
      << status.error_message();
}

TEST(NewtonSchulzFault, AFailedReductionTouchesNoState) {
  const auto service = StartService({.threads = 1, .fault_points = "fail_reduce:3:1"});
  const RunSpec spec = SpecOf(kParameters);
  TestRun run(*service, spec);
  ASSERT_TRUE(run.Step(NoiseFor(spec, 1)).applied);
  const std::string before = run.TensorDigest();
  const auto outcome = run.TryStep({.gradients = {{NoiseFor(spec, 2)}}})[0];
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("injected fault"));
  EXPECT_EQ(run.TensorDigest(), before);
  EXPECT_EQ(run.Status().position().state(), v1::RUN_STATE_FAILED);
}

TEST(NewtonSchulzFault, ANanInMomentumIsSeen) {
  const auto service = StartService({.threads = 1, .fault_points = "momentum_nan:0:1"});
  const RunSpec spec = SpecOf(kParameters);
  TestRun run(*service, spec);
  run.Step(NoiseFor(spec, 1));
  EXPECT_EQ(run.Status().momentum_nonfinite(), 1);
  EXPECT_EQ(run.Describe("a").nonfinite_elements(), 1);
  EXPECT_EQ(run.Describe("b").nonfinite_elements(), 0);
  EXPECT_EQ(run.Status().state_nonfinite(), 1);
  // The damage does not spread: no step is applied to it.
  const StepOutcome next = run.Step(NoiseFor(spec, 2));
  EXPECT_FALSE(next.applied);
  EXPECT_EQ(next.cause, SkipCause::kStateOverflow);
}

}  // namespace
}  // namespace muond::cluster
