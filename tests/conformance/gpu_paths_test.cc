// The paths of GPU memory without a GPU: a daemon whose devices keep their memory from the host, a
// trainer whose driver opens what they share.
#include <cmath>
#include <limits>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/gpu_trainer.h"
#include "tests/conformance/transport_paths.h"
#include "tests/conformance/twenty_steps.h"

namespace muond::conformance {
namespace {

using cluster::Must;
using cluster::Tensors;
using muond::testing::FakeGpuDriver;
using ::testing::HasSubstr;

TEST(GpuPaths, TwentyStepsWithASkipAreTheSameOverGrpcIpcAndPointers) {
  PathDaemon first(WithDevices(1));
  GpuTrainer by_grpc(Ipc(first, "grpc"));
  EXPECT_EQ(by_grpc.session().transports()[0].name, "grpc");
  const Trained reference = TwentySteps(first, by_grpc, false);
  for (const bool one_call : {false, true}) {
    PathDaemon daemon(WithDevices(1));
    GpuTrainer trainer(Ipc(daemon));
    EXPECT_EQ(trainer.session().transports()[0].name, "cuda-ipc");
    EXPECT_EQ(TwentySteps(daemon, trainer, one_call), reference) << one_call;
    EXPECT_GT(daemon.Metric(
                  "muond_transport_bytes_total{direction=\"rx\",transport=\"cuda-ipc\"}"),
              0);
    EXPECT_EQ(daemon.Metric("muond_transport_bytes_total{direction=\"rx\",transport=\"grpc\"}"),
              0);
  }
}

TEST(GpuPaths, SlicesByColumnsAndTwoDevicesLeadToTheSameState) {
  std::vector<std::string> digests;
  for (const int devices : {1, 2}) {
    PathDaemon daemon(WithDevices(devices));
    GpuTrainer trainer(Ipc(daemon, "cuda-ipc"), {cluster::Cut::kCols, 3});
    digests.push_back(TwentySteps(daemon, trainer, true).digest);
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST(GpuPaths, ViewsOfTheSharedMemoryNeedNoCopy) {
  PathDaemon daemon(WithDevices(1));
  GpuTrainer trainer(Ipc(daemon));
  trainer.Initialize();
  auto sources = trainer.Noise(5);
  for (client::SliceSource& source : sources) {
    void* const place = Must(trainer.session().GradientPlace(source.parameter, source.slice, 1));
    std::memcpy(place, source.data,
                static_cast<std::size_t>(source.elements) * DtypeBytes(source.dtype));
    source.data = place;
  }
  auto sinks = trainer.Sinks();
  for (client::SliceSink& sink : sinks) {
    sink.data = Must(trainer.session().ParameterPlace(sink.parameter, sink.slice));
  }
  const std::int64_t copied = trainer.driver().copied;
  const StepOutcome outcome = Must(trainer.session().StepAndPull({}, sources, sinks));
  EXPECT_TRUE(outcome.applied);
  EXPECT_EQ(trainer.driver().copied, copied);
  // What lies there is what a pull brings.
  const auto copies = trainer.Sinks();
  Must(trainer.session().Pull(outcome.version, copies));
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    EXPECT_EQ(std::memcmp(sinks[i].data, trainer.pulled()[i].data(), trainer.pulled()[i].size()), 0)
        << sinks[i].parameter;
  }
  EXPECT_FALSE(trainer.session().GradientPlace("w.big", 9, 0).ok());
  EXPECT_FALSE(trainer.session().GradientPlace("w.big", 0, 2).ok());
}

TEST(GpuPaths, TheSameAgainIsADuplicateAndOtherBytesAConflictByWhicheverPathTheyCome) {
  PathDaemon daemon(WithDevices(1));
  GpuTrainer ipc(Ipc(daemon, "cuda-ipc"));
  ipc.Initialize();
  Must(ipc.session().Begin({}));
  Must(ipc.session().Push(ipc.Noise(5)));
  EXPECT_TRUE(ipc.session().Push(ipc.Noise(5)).ok());
  EXPECT_EQ(ipc.session().Push(ipc.Noise(6)).code(), absl::StatusCode::kAlreadyExists);
  // The same rank comes back by another path in the same step.
  GpuTrainer grpc(Ipc(daemon, "grpc"));
  Must(grpc.session().Begin({}));
  EXPECT_TRUE(grpc.session().Push(grpc.Noise(5)).ok());
  EXPECT_EQ(grpc.session().Push(grpc.Noise(6)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Must(grpc.session().Finish()).applied);
  // And the other way round.
  Must(grpc.session().Begin({}));
  Must(grpc.session().Push(grpc.Noise(7)));
  Must(ipc.session().Rejoin());
  Must(ipc.session().Begin({}));
  EXPECT_TRUE(ipc.session().Push(ipc.Noise(7)).ok());
  EXPECT_EQ(ipc.session().Push(ipc.Noise(8)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Must(ipc.session().Finish()).applied);
}

TEST(GpuPaths, WhatTheTrainerWritesAfterAPushChangesNothing) {
  std::string digests[2];
  for (const bool poison : {false, true}) {
    PathDaemon daemon(WithDevices(1));
    GpuTrainer trainer(Ipc(daemon, "cuda-ipc"));
    trainer.Initialize();
    Must(trainer.session().Begin({}));
    Must(trainer.session().Push(trainer.Noise(5)));
    for (int window = 0; poison && window < 2; ++window) {
      void* const place = Must(trainer.session().GradientPlace("w.big", 0, window));
      std::memset(place, 0xff, 64 * 190 * 4);
    }
    EXPECT_TRUE(Must(trainer.session().Finish()).applied);
    digests[poison] = DigestOf(daemon.service());
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST(GpuPaths, GradientsPushedOneByOneAndMicroBatchesMakeAStep) {
  std::string digests[2];
  for (const bool one_by_one : {false, true}) {
    PathDaemon daemon(WithDevices(1));
    GpuTrainer trainer(Ipc(daemon, one_by_one ? "cuda-ipc" : "grpc"));
    trainer.Initialize();
    Must(trainer.session().Begin({.micro_batches = 2}));
    for (int batch = 0; batch < 2; ++batch) {
      auto sources = trainer.Noise(20 + batch);
      for (auto& source : sources) source.micro_batch = batch;
      for (std::size_t i = sources.size(); i-- > 0;) {
        Must(Must(trainer.session().PushAsync({&sources[i], 1}))->Wait(absl::Seconds(30)));
      }
    }
    auto sinks = trainer.Sinks();
    EXPECT_TRUE(Must(trainer.session().FinishAndPull(sinks)).applied);
    digests[one_by_one] = DigestOf(daemon.service());
  }
  EXPECT_EQ(digests[0], digests[1]);
}

// ---- The choice ---------------------------------------------------------------------------------

TEST(GpuPaths, WhatStandsInTheWayIsSaidCountedAndRefusedWhenForced) {
  PathDaemon daemon(WithDevices(1));
  client::SessionOptions other = Ipc(daemon);
  other.gpu = 3;
  {
    GpuTrainer trainer(other);
    const client::ChosenTransport chosen = trainer.session().transports()[0];
    EXPECT_EQ(chosen.name, "arena");
    EXPECT_THAT(chosen.reason, HasSubstr("GPU-fake-3"));
    EXPECT_EQ(daemon.Metric("muond_transport_fallbacks_total{from=\"cuda-ipc\",reason="
                            "\"other_gpu\",to=\"grpc\"}"),
              1);
  }
  other.transport = "cuda-ipc";
  other.gpu_driver = std::make_shared<FakeGpuDriver>();
  const RunSpec spec = GpuSpec();
  const auto forced =
      client::Session::Open(spec, 0, cluster::CutOf(spec, {cluster::Cut::kRows, 1}, 0), other);
  EXPECT_EQ(forced.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(forced.status().message()), HasSubstr("none of the daemon's"));
  other.gpu = 0;
  other.transport = "nccl";
  const auto nccl =
      client::Session::Open(spec, 0, cluster::CutOf(spec, {cluster::Cut::kRows, 1}, 0), other);
  EXPECT_EQ(nccl.status().code(), nccl.status().code());
  EXPECT_FALSE(nccl.ok());
}

TEST(GpuPaths, AHandleThatCantBeOpenedIsAFallbackWithTheReason) {
  PathDaemon daemon(WithDevices(1));
  auto driver = std::make_shared<FakeGpuDriver>();
  driver->refuse_open = true;
  client::SessionOptions options = Ipc(daemon);
  options.gpu = 0;
  options.gpu_driver = driver;
  const RunSpec spec = GpuSpec();
  const RankSlices slices = cluster::CutOf(spec, {cluster::Cut::kRows, 1}, 0);
  auto session = Must(client::Session::Open(spec, 0, slices, options));
  EXPECT_EQ(session->transports()[0].name, "grpc");
  EXPECT_THAT(session->transports()[0].reason, HasSubstr("no such block"));
  EXPECT_EQ(daemon.Metric("muond_transport_fallbacks_total{from=\"cuda-ipc\",reason="
                          "\"not_attached\",to=\"grpc\"}"),
            1);
  EXPECT_EQ(daemon.Metric("muond_memory_bytes{kind=\"gpu_arena\",location=\"device\"}"), 0);
}

TEST(GpuPaths, DetachingGivesTheMemoryBack) {
  PathDaemon daemon(WithDevices(1));
  for (int i = 0; i < 20; ++i) {
    GpuTrainer trainer(Ipc(daemon, "cuda-ipc"));
    EXPECT_EQ(trainer.driver().open, 1);
    EXPECT_EQ(daemon.Metric("muond_transport_connections{transport=\"cuda-ipc\"}"), 1);
    EXPECT_GT(daemon.Metric("muond_memory_bytes{kind=\"gpu_arena\",location=\"device\"}"), 0);
    Must(trainer.session().Close());
  }
  // The call that lets go of it may answer before the last user has.
  const auto held = [&] {
    return daemon.Metric("muond_memory_bytes{kind=\"gpu_arena\",location=\"device\"}") +
           daemon.Metric("muond_transport_connections{transport=\"cuda-ipc\"}");
  };
  for (int i = 0; i < 3000 && held() > 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(held(), 0);
}

}  // namespace
}  // namespace muond::conformance
