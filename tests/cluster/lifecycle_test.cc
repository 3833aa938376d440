// Runs come and go without a trace, share nothing, and a daemon that stops lets nobody wait.
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RunSpec Spec(const std::string& name, std::int64_t world_size = 1) {
  RunSpec spec = SpecOf({Matrix("w", 3, 3), Vector("p", 4)}, world_size);
  spec.name = name;
  return spec;
}

// True once `condition` holds; false when it does not within half a minute.
bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return false;
}

// The run's memory goes with the last call on it that is still being taken down.
bool SeriesGone(Service& service, const std::string& run) {
  return Eventually(
      [&] { return service.Metrics().find("run=\"" + run + "\"") == std::string::npos; });
}

TEST(Lifecycle, CloseFreesEverything) {
  const auto service = StartService();
  client::Admin admin(service->channel(), absl::Seconds(30));
  EXPECT_THAT(service->Metrics(), Not(HasSubstr("run=\"run\"")));
  {
    TestRun run(*service, Spec("run"));
    run.Step(NoiseFor(run.spec(), 1));
    EXPECT_THAT(service->Metrics(), HasSubstr("run=\"run\""));
    EXPECT_TRUE(Must(run.session().Close()));
  }
  EXPECT_EQ(Must(admin.Status()).runs_size(), 0);
  EXPECT_EQ(admin.Status("run").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(admin.Digest("run").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(SeriesGone(*service, "run"));
  RawTrainer trainer(*service, "run");
  EXPECT_EQ(trainer.Begin(1).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(trainer.Finish(0).status().code(), absl::StatusCode::kNotFound);
  // The name is free, for another model, which starts from nothing.
  RunSpec other = SpecOf({Vector("q", 2)});
  TestRun run(*service, other);
  EXPECT_EQ(run.session().next_step(), 0);
  EXPECT_FALSE(run.session().registered().rejoined());
  EXPECT_TRUE(run.Step({{"q", {1, 2}}}).applied);
}

TEST(Lifecycle, OpenAndCloseLeaksNoSeries) {
  const auto service = StartService();
  const auto count = [&] { return CountPlainSeries(ParseExposition(service->Metrics())); };
  std::size_t after_first = 0;
  for (int i = 0; i < 20; ++i) {
    TestRun run(*service, Spec("run-" + std::to_string(i)));
    run.Step(NoiseFor(run.spec(), i));
    Must(run.session().Close());
    EXPECT_TRUE(SeriesGone(*service, run.spec().name));
    if (i == 0) after_first = count();
  }
  EXPECT_EQ(count(), after_first);
}

TEST(Lifecycle, TheLastRankClosesTheRun) {
  const auto service = StartService();
  TestRun run(*service, Spec("run", 2), {.cut = {Cut::kFlat}});
  RawTrainer zero(*service, "run", 0);
  const v1::CloseReply first = Must(zero.Close());
  EXPECT_FALSE(first.closed());
  EXPECT_THAT(first.open_ranks(), ::testing::ElementsAre(1));
  EXPECT_FALSE(Must(zero.Close()).closed()) << "again";
  EXPECT_EQ(run.Status().world_size(), 2) << "still there";
  EXPECT_TRUE(Must(run.session(1).Close()));
  EXPECT_EQ(run.admin().Status("run").status().code(), absl::StatusCode::kNotFound);
}

TEST(Lifecycle, CloseEndsTheWaitOfOthersOfTheRun) {
  const auto service = StartService();
  TestRun run(*service, Spec("run", 2), {.cut = {Cut::kFlat}});
  absl::Status told;
  std::thread waiting([&] {
    RawTrainer zero(*service, "run", 0);
    Must(zero.Begin(0));
    told = zero.Finish(0).status();
  });
  EXPECT_TRUE(Eventually([&] {
    const auto waiting_ranks = run.Status().waiting_ranks();
    return waiting_ranks.size() == 1 && waiting_ranks.Get(0) == 1;
  }));
  Must(run.session(1).Close());
  Must(RawTrainer(*service, "run", 0).Close());
  waiting.join();
  EXPECT_EQ(told.code(), absl::StatusCode::kAborted) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("run \"run\": was closed"));
}

TEST(Lifecycle, RunsShareNothing) {
  const auto service = StartService();
  TestRun a(*service, Spec("a")), b(*service, Spec("b"));
  EXPECT_EQ(a.TensorDigest(), b.TensorDigest()) << "same values";
  const std::string before = b.TensorDigest();
  a.Step(NoiseFor(a.spec(), 1));
  Tensors bad = NoiseFor(a.spec(), 2);
  bad.at("w")[0] = INFINITY;
  a.Step(bad);
  EXPECT_EQ(b.TensorDigest(), before);
  EXPECT_EQ(b.Status().position().next_step(), 0);
  EXPECT_EQ(b.Status().steps_skipped_size(), 0);
  Must(a.session().Close());
  EXPECT_TRUE(b.Step(NoiseFor(b.spec(), 1)).applied);
}

TEST(Lifecycle, TooManyRunsAreRefusedByName) {
  const auto service = StartService({.threads = 1, .max_runs = 2});
  TestRun a(*service, Spec("a")), b(*service, Spec("b"));
  RawTrainer trainer(*service, "c");
  const absl::Status status =
      trainer.Register(trainer.RegisterRequestOf(Spec("c"), CutOf(Spec("c"), {}, 0))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("run \"c\""));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--max-runs"));
  Must(a.session().Close());
  EXPECT_TRUE(TestRun(*service, Spec("c")).Step(NoiseFor(Spec("c"), 1)).applied);
}

TEST(Lifecycle, ARunBeyondTheMemoryLimitIsRefusedByName) {
  const auto service = StartService({.threads = 1, .max_run_bytes = 100});
  RawTrainer trainer(*service, "run");
  const absl::Status status =
      trainer.Register(trainer.RegisterRequestOf(Spec("run"), CutOf(Spec("run"), {}, 0))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("run \"run\""));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--max-run-bytes"));
}

// Each micro-batch stages a tensor of its own, whatever the size of the chunks that open it.
TEST(Lifecycle, StagedMicroBatchesAreWithinTheMemoryLimit) {
  const auto service = StartService({.threads = 1, .max_run_bytes = 1 << 20});
  const RunSpec spec = SpecOf({Matrix("w", 128, 128)});
  TestRun run(*service, spec);
  const std::string before = run.TensorDigest();
  Must(run.session().Begin({.micro_batches = 1000}));
  const Floats gradient = Noise(128 * 128, 5);
  absl::Status status;
  for (std::int64_t micro = 0; status.ok() && micro < 1000; ++micro) {
    const client::SliceSource slice{.parameter = "w",
                                    .data = gradient.data(),
                                    .elements = 128 * 128,
                                    .micro_batch = micro};
    status = run.session().Push({&slice, 1});
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--max-run-bytes"));
  EXPECT_LE(run.Status().staging_bytes(), 1 << 20);
  EXPECT_EQ(run.TensorDigest(), before);
}

// A stream whose parameter could not get memory for another dtype must still be answered.
TEST(Lifecycle, AStreamOutlivesARefusedOneOfAnotherDtype) {
  const std::int64_t state = 128 * 128 * 8, layer = 128 * 128 * 4;
  const auto service = StartService({.threads = 1, .max_run_bytes = state + layer + 1000});
  TestRun run(*service, SpecOf({Matrix("w", 128, 128)}));
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  const std::string bytes = Bytes(Noise(128 * 128, 5));
  const auto stub = v1::Optimizer::NewStub(service->channel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  v1::PushReply reply;
  const auto stream = stub->Push(&context, &reply);
  v1::PushRequest request;
  *request.mutable_id() = trainer.id();
  *request.mutable_chunk() = ChunkOf("w", 0, 0, bytes.substr(0, 4096));
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(Eventually([&] { return run.Status().staging_bytes() == layer; }));
  const auto refused = trainer.Push(0, {ChunkOf("w", 0, 0, "xx", v1::DTYPE_F16)});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  *request.mutable_chunk() = ChunkOf("w", 0, 1024, bytes.substr(4096));
  stream->Write(request);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.slices_accepted(), 1);
}

TEST(Lifecycle, AModelWhoseRegistrationExceedsGrpcsDefaultLimitRegisters) {
  const auto service = StartService({.threads = 1});
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 20000; ++i) {
    parameters.push_back(Vector(std::string(200, 'n') + std::to_string(i), 1));
  }
  const RunSpec spec = SpecOf(parameters);
  RawTrainer trainer(*service, "run");
  const v1::RegisterRequest request = trainer.RegisterRequestOf(spec, CutOf(spec, {}, 0));
  ASSERT_GT(request.ByteSizeLong(), 8u << 20);
  const auto reply = trainer.Register(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->routing().adamw_parameters(), 20000);
}

TEST(Lifecycle, ARunLargerThanTheMachineIsRefusedBeforeAnythingIsAllocated) {
  const auto service = StartService({.threads = 1});
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 4096; ++i) parameters.push_back(Vector("v" + std::to_string(i), 1 << 28));
  const RunSpec spec = SpecOf(parameters);
  RawTrainer trainer(*service, "run");
  const absl::Status status =
      trainer.Register(trainer.RegisterRequestOf(spec, CutOf(spec, {}, 0))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the machine has"));
  EXPECT_TRUE(TestRun(*service, Spec("run")).Step(NoiseFor(Spec("run"), 1)).applied);
}

TEST(Lifecycle, CallsEqualMatricesTimesAppliedSteps) {
  const auto service = StartService();
  RunSpec spec = SpecOf({Matrix("a", 3, 3), Matrix("b", 2, 5), Matrix("c", 5, 2), Vector("p", 4)});
  TestRun run(*service, spec);
  for (std::uint64_t step = 0; step < 6; ++step) {
    Tensors gradients = NoiseFor(spec, step);
    if (step % 3 == 1) gradients.at("p")[0] = NAN;
    const StepOutcome outcome = run.Step(gradients);
    EXPECT_EQ(outcome.newton_schulz_calls, outcome.applied ? 3 : 0);
  }
  const v1::RunStatus status = run.Status();
  EXPECT_EQ(status.muon_matrices(), 3);
  EXPECT_EQ(status.steps_applied(), 4);
  EXPECT_EQ(status.newton_schulz_calls(), status.muon_matrices() * status.steps_applied());
  EXPECT_EQ(ParseExposition(service->Metrics())
                .at("muond_newton_schulz_calls_total{group=\"muon\",run=\"run\"}"),
            12);
}

TEST(Lifecycle, HealthIsServedWhileItRuns) {
  const auto service = StartService();
  client::Admin admin(service->channel(), absl::Seconds(30));
  for (const char* name : {"", "liveness", "readiness"}) {
    EXPECT_EQ(Must(admin.Health(name)), "SERVING") << name;
  }
}

// ---- Stopping ----------------------------------------------------------------------------------

TEST(Lifecycle, StopLetsNobodyWait) {
  const auto service = StartService();
  TestRun run(*service, Spec("run", 2), {.cut = {Cut::kFlat}});
  absl::Status told;
  std::thread waiting([&] {
    RawTrainer zero(*service, "run", 0);
    Must(zero.Begin(0));
    told = zero.Finish(0).status();
  });
  EXPECT_TRUE(Eventually([&] { return run.Status().waiting_ranks_size() == 1; }));
  const absl::Time start = absl::Now();
  service->Stop(absl::Seconds(10));
  EXPECT_LT(absl::Now() - start, absl::Seconds(9)) << "nothing is left to wait for";
  waiting.join();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("shutting down"));
}

// Shutdown must not wait for streams that will never end.
TEST(Lifecycle, Grpc7755_StopCancelsOpenStreams) {
  const auto service = StartService();
  TestRun run(*service, Spec("run"));
  const auto stub = v1::Optimizer::NewStub(service->channel());
  grpc::ClientContext push_context, initialize_context;
  v1::PushReply push_reply;
  v1::InitializeReply initialize_reply;
  const auto push = stub->Push(&push_context, &push_reply);
  const auto initialize = stub->Initialize(&initialize_context, &initialize_reply);
  RawTrainer trainer(*service, "run");
  Must(trainer.Begin(0));
  v1::PushRequest request;
  *request.mutable_id() = trainer.id();
  *request.mutable_chunk() = ChunkOf("p", 0, 0, Bytes({1}));
  ASSERT_TRUE(push->Write(request));
  const absl::Time start = absl::Now();
  service->Stop(absl::Seconds(1));
  EXPECT_LT(absl::Now() - start, absl::Seconds(6));
  EXPECT_FALSE(push->Finish().ok());
  EXPECT_FALSE(initialize->Finish().ok());
}

// What is past its verdict is finished, and its trainer is told. Over a socket: the in-process
// transport closes at once.
TEST(Lifecycle, StopDuringACommitTellsTheOutcome) {
  const auto service =
      StartService({.threads = 1, .listen = {"127.0.0.1:0"}, .fault_points = "delay_commit:0:1"});
  TestRun run(*service, Spec("run"));
  absl::StatusOr<v1::StepOutcome> outcome = absl::UnknownError("not answered");
  RawTrainer trainer(
      grpc::CreateChannel(service->addresses().at(0), grpc::InsecureChannelCredentials()), "run");
  Must(trainer.Begin(0));
  for (const auto& [name, values] : NoiseFor(run.spec(), 1)) {
    Must(trainer.Push(0, {ChunkOf(name, 0, 0, Bytes(values))}));
  }
  std::thread waiting([&] { outcome = trainer.Finish(0); });
  // All slices are in and nobody is missing: the commit has begun, with its second of delay.
  EXPECT_TRUE(Eventually([&] { return service->FaultsFired("delay_commit") == 1; }));
  service->Stop(absl::Seconds(10));
  waiting.join();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied());
}

TEST(Lifecycle, ACallerThatGoesAwayLeavesItsFinish) {
  const auto service = StartService();
  TestRun run(*service, Spec("run", 2), {.cut = {Cut::kFlat}});
  const auto stub = v1::Optimizer::NewStub(service->channel());
  RawTrainer zero(*service, "run", 0);
  Must(zero.Begin(0));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)));
  v1::FinishRequest request;
  *request.mutable_id() = zero.id();
  v1::FinishReply reply;
  EXPECT_EQ(stub->Finish(&context, request, &reply).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(run.Step(NoiseFor(run.spec(), 1)).applied);
}

}  // namespace
}  // namespace muond::cluster
