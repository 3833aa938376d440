// The paths of GPU memory without a GPU: a daemon whose devices keep their memory from the host, a
// trainer whose driver opens what they share.
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/status.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/device_like_backend.h"
#include "tests/support/fake_gpu_driver.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Must;
using cluster::Tensors;
using muond::testing::FakeGpuDriver;
using ::testing::HasSubstr;

RunSpec SomeSpec() {
  std::vector<ParameterSpec> parameters = {cluster::Matrix("w.big", 64, 190),
                                           cluster::Matrix("w.odd", 37, 53),
                                           cluster::Vector("norm", 19)};
  return cluster::SpecOf(std::move(parameters));
}

ServiceOptions WithDevices(int count, bool memories = true) {
  ServiceOptions options{.threads = 1};
  options.make_backends = [count](const kernels::BackendOptions& made) {
    std::vector<std::unique_ptr<kernels::Backend>> backends;
    for (int i = 0; i < count; ++i) {
      backends.push_back(muond::testing::MakeDeviceLikeBackend(kernels::MakeCpuBackend(made)));
    }
    return backends;
  };
  options.make_memories = [count, memories] {
    std::vector<std::unique_ptr<kernels::DeviceMemory>> list;
    for (int i = 0; i < count && memories; ++i) {
      list.push_back(muond::testing::MakeDeviceLikeMemory(FakeGpuDriver::NameOf(i)));
    }
    return list;
  };
  return options;
}

// One rank whose buffers are a GPU's, as far as anybody can tell.
class GpuTrainer {
 public:
  GpuTrainer(client::SessionOptions options, cluster::Cut cut = {cluster::Cut::kRows, 1})
      : spec_(SomeSpec()), slices_(cluster::CutOf(spec_, cut, 0)) {
    options.gpu = options.gpu < 0 ? 0 : options.gpu;
    options.gpu_driver = driver_;
    gpu_ = options.gpu;
    session_ = Must(client::Session::Open(spec_, 0, slices_, options));
  }

  client::Session& session() { return *session_; }
  FakeGpuDriver& driver() { return *driver_; }
  const RunSpec& spec() const { return spec_; }

  std::vector<client::SliceSource> Sources(const Tensors& tensors) {
    bytes_.clear();
    std::vector<client::SliceSource> sources;
    for (const ParameterSpec& parameter : spec_.parameters) {
      const std::vector<Box>& boxes = slices_.at(parameter.name);
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        bytes_.push_back(cluster::BoxBytes(boxes[i], *parameter.shape, tensors.at(parameter.name),
                                           parameter.dtype));
        sources.push_back({.parameter = parameter.name,
                           .slice = static_cast<std::int64_t>(i),
                           .elements = boxes[i].Elements(),
                           .dtype = parameter.dtype,
                           .place = {.device = gpu_}});
      }
    }
    for (std::size_t i = 0; i < sources.size(); ++i) sources[i].data = bytes_[i].data();
    return sources;
  }
  std::vector<client::SliceSource> Noise(int seed) {
    return Sources(cluster::NoiseFor(spec_, seed));
  }
  std::vector<client::SliceSink> Sinks() {
    const auto sources = Noise(1);
    pulled_.clear();
    for (const auto& source : sources) {
      pulled_.emplace_back(static_cast<std::size_t>(source.elements) * DtypeBytes(source.dtype),
                           '\xff');
    }
    std::vector<client::SliceSink> sinks;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sinks.push_back({.parameter = sources[i].parameter,
                       .slice = sources[i].slice,
                       .data = pulled_[i].data(),
                       .elements = sources[i].elements,
                       .dtype = sources[i].dtype,
                       .place = {.device = gpu_}});
    }
    return sinks;
  }
  const std::vector<std::string>& pulled() const { return pulled_; }
  const std::vector<std::string>& bytes() const { return bytes_; }
  void Initialize() { ASSERT_TRUE(Must(session_->Initialize(Noise(1)))); }

 private:
  const RunSpec spec_;
  const RankSlices slices_;
  int gpu_ = 0;
  std::shared_ptr<FakeGpuDriver> driver_ = std::make_shared<FakeGpuDriver>();
  std::vector<std::string> bytes_, pulled_;
  std::unique_ptr<client::Session> session_;
};

client::SessionOptions Ipc(PathDaemon& daemon, const std::string& transport = "auto") {
  client::SessionOptions options;
  options.endpoint = daemon.unix_address();
  options.transport = transport;
  return options;
}

std::string DigestOf(Service& service) {
  return Must(client::Admin(service.channel(), absl::Seconds(30)).Digest("run")).tensor_digest();
}

// Twenty steps, one of them skipped; what the trainer gets back of each, and the digest.
struct Trained {
  std::string digest;
  std::vector<std::vector<std::string>> parameters;
  friend bool operator==(const Trained&, const Trained&) = default;
};

Trained TwentySteps(PathDaemon& daemon, GpuTrainer& trainer, bool one_call) {
  trainer.Initialize();
  Trained result;
  for (int step = 0; step < 20; ++step) {
    Tensors gradients = cluster::NoiseFor(trainer.spec(), 100 + step);
    if (step == 7) gradients.at("w.odd")[11] = std::numeric_limits<float>::infinity();
    auto sinks = trainer.Sinks();
    const auto sources = trainer.Sources(gradients);
    StepOutcome outcome;
    if (one_call) {
      outcome = Must(trainer.session().StepAndPull({}, sources, sinks));
    } else {
      outcome = Must(trainer.session().Step({}, sources));
      Must(trainer.session().Pull(outcome.version, sinks));
    }
    EXPECT_EQ(outcome.applied, step != 7);
    result.parameters.push_back(trainer.pulled());
  }
  result.digest = DigestOf(daemon.service());
  return result;
}

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
  const RunSpec spec = SomeSpec();
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
  const RunSpec spec = SomeSpec();
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
  EXPECT_EQ(daemon.Metric("muond_memory_bytes{kind=\"gpu_arena\",location=\"device\"}"), 0);
  EXPECT_EQ(daemon.Metric("muond_transport_connections{transport=\"cuda-ipc\"}"), 0);
}

// ---- What a hostile trainer says ----------------------------------------------------------------

class Hostile : public ::testing::Test {
 protected:
  PathDaemon daemon_{WithDevices(1)};
  GpuTrainer trainer_{Ipc(daemon_, "cuda-ipc")};
  std::unique_ptr<v1::Optimizer::Stub> stub_ =
      v1::Optimizer::NewStub(grpc::CreateChannel(daemon_.unix_address(),
                                                 grpc::InsecureChannelCredentials()));

  v1::ExchangeRequest Request() {
    v1::ExchangeRequest request;
    request.mutable_id()->set_run("run");
    request.mutable_id()->set_generation(trainer_.session().generation());
    return request;
  }
  absl::Status Call(const v1::ExchangeRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    v1::ExchangeReply reply;
    return FromGrpc(stub_->Exchange(&context, request, &reply));
  }
  void StillWorks() {
    trainer_.Initialize();
    EXPECT_TRUE(Must(trainer_.session().Step({}, trainer_.Noise(5))).applied);
  }
};

TEST_F(Hostile, PointersFromAnotherProcessAreRefused) {
  v1::ExchangeRequest request = Request();
  v1::Chunk* chunk = request.mutable_fill()->add_chunks();
  chunk->set_parameter("norm");
  chunk->mutable_region()->set_offset(4096);
  chunk->mutable_region()->set_bytes(19 * 4);
  for (const int lease : {0, 1, 77}) {
    request.mutable_fill()->set_sequence(lease);
    EXPECT_EQ(Call(request).code(), absl::StatusCode::kPermissionDenied);
  }
  request.clear_fill();
  request.mutable_pull()->mutable_pull();
  EXPECT_EQ(Call(request).code(), absl::StatusCode::kPermissionDenied);
  StillWorks();
}

TEST_F(Hostile, HandlesOfAnyLengthThatAreNoneAreRefused) {
  for (const std::size_t length : {1u, 15u, 16u, 17u, 64u, 4096u}) {
    v1::ExchangeRequest request = Request();
    request.mutable_fill()->set_arena(std::string(length, 'x'));
    EXPECT_EQ(Call(request).code(), absl::StatusCode::kFailedPrecondition) << length;
  }
  StillWorks();
}

TEST_F(Hostile, AnArenaIsMadeOfSizesThatMakeSense) {
  v1::OpenArenaRequest open;
  *open.mutable_id() = Request().id();
  open.set_gpu(FakeGpuDriver::NameOf(0));
  const std::vector<std::array<std::int64_t, 3>> sizes = {
      {0, 1, 256},  {256, 0, 256},  {256, 17, 256}, {255, 1, 256},
      {-256, 1, 256}, {256, 1, 0}, {std::numeric_limits<std::int64_t>::max(), 1, 256},
      {std::int64_t{1} << 41, 2, 256}};
  for (const auto& [bytes, windows, pull] : sizes) {
    open.set_window_bytes(bytes);
    open.set_windows(windows);
    open.set_pull_bytes(pull);
    grpc::ClientContext context;
    v1::OpenArenaReply reply;
    EXPECT_EQ(FromGrpc(stub_->OpenArena(&context, open, &reply)).code(),
              absl::StatusCode::kInvalidArgument)
        << bytes << " " << windows << " " << pull;
  }
  open.set_gpu("GPU-of-somebody-else");
  grpc::ClientContext context;
  v1::OpenArenaReply reply;
  EXPECT_THAT(std::string(FromGrpc(stub_->OpenArena(&context, open, &reply)).message()),
              HasSubstr("the daemon has no GPU"));
}

}  // namespace
}  // namespace muond::conformance
