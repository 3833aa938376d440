// The path "nccl" without NCCL and without a GPU: everything from the session to the state, over
// the fake (nccl/fake.h). What the real ones add is in nccl_gpu_test.
#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device_memory.h"
#include "nccl/fake.h"
#include "nccl/link.h"
#include "server/transport/pair_table.h"
#include "tests/conformance/transport_paths.h"
#include "tests/conformance/twenty_steps.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Must;
using cluster::Tensors;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kDaemonGpu[] = "GPU-daemon";

// Device memory is the host's, each ordinal another GPU.
class HostGpuDriver final : public client::GpuDriver {
 public:
  static std::string NameOf(int device) { return "GPU-trainer-" + std::to_string(device); }
  absl::StatusOr<std::string> Uuid(int device) override {
    return device == 99 ? kDaemonGpu : NameOf(device);
  }
  absl::StatusOr<void*> Open(int, const std::string&) override {
    return absl::FailedPreconditionError("no handle is opened here");
  }
  void Close(int, void*) override {}
  absl::Status Copy(const client::GpuPlace&, void* to, const void* from,
                    std::size_t bytes) override {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status Wait(const client::GpuPlace&) override { return absl::OkStatus(); }
  void* Allocate(int, std::size_t bytes) override { return ::operator new(bytes); }
  void Free(int, void* memory) override { ::operator delete(memory); }
  void* AllocatePinned(int, std::size_t bytes) override { return ::operator new(bytes); }
  void FreePinned(int, void* memory) override { ::operator delete(memory); }
};

// Slices above and below what travels alone; more than a pull of small pieces has under way.
RunSpec SomeSpec() {
  std::vector<ParameterSpec> all{cluster::Matrix("w.big", 640, 520), cluster::Vector("norm", 19)};
  for (const char* name : {"w.odd", "b", "c", "d"}) all.push_back(cluster::Matrix(name, 41, 53));
  return cluster::SpecOf(std::move(all));
}

ServiceOptions WithNccl(absl::Duration deadline = absl::Seconds(10)) {
  ServiceOptions options{.threads = 1};
  options.nccl = "auto";
  options.nccl_deadline = deadline;
  options.make_backends = [](const kernels::BackendOptions& made) {
    std::vector<std::unique_ptr<kernels::Backend>> backends;
    backends.push_back(kernels::MakeCpuBackend(made));
    return backends;
  };
  options.make_memories = [] {
    std::vector<std::unique_ptr<kernels::DeviceMemory>> memories;
    memories.push_back(kernels::MakeHostDeviceMemory(kDaemonGpu));
    return memories;
  };
  options.find_nccl = []() -> absl::StatusOr<NcclPlatform> {
    return NcclPlatform{&nccl::fake::TheLibrary(), nccl::fake::MakeDevice(kDaemonGpu)};
  };
  return options;
}

client::SessionOptions OptionsFor(PathDaemon& daemon, const std::string& transport, int gpu = 5) {
  client::SessionOptions options;
  options.endpoint = daemon.service().addresses()[1];
  options.transport = transport;
  options.gpu = gpu;
  options.gpu_driver = std::make_shared<HostGpuDriver>();
  options.nccl_timeout = absl::Seconds(5);
  options.nccl_worker = std::make_shared<nccl::Worker>(
      nccl::fake::TheLibrary().api, nccl::fake::MakeDevice(*options.gpu_driver->Uuid(gpu)));
  return options;
}

class Trainer {
 public:
  explicit Trainer(client::SessionOptions options, cluster::Cut cut = {cluster::Cut::kRows, 1})
      : spec_(SomeSpec()), slices_(cluster::CutOf(spec_, cut, 0)), gpu_(options.gpu) {
    session_ = Must(client::Session::Open(spec_, 0, slices_, options));
  }
  client::Session& session() { return *session_; }
  const RunSpec& spec() const { return spec_; }
  client::ChosenTransport path() const { return session_->transports()[0]; }

  // Adds these and sends their values.
  void Add(const std::vector<ParameterSpec>& parameters) {
    RunSpec alone = spec_;
    alone.parameters = parameters;
    const RankSlices slices = cluster::CutOf(alone, {cluster::Cut::kRows, 1}, 0);
    Must(session_->AddParameters({.groups = {}, .parameters = parameters, .slices = slices}));
    const std::size_t first = spec_.parameters.size();
    spec_ = Extended(std::move(spec_), {}, parameters);
    slices_.insert(slices.begin(), slices.end());
    ASSERT_TRUE(Must(session_->Initialize(Sources(cluster::NoiseFor(spec_, 1), first))));
  }

  std::vector<client::SliceSource> Sources(const Tensors& tensors, std::size_t first = 0) {
    bytes_.clear();
    std::vector<client::SliceSource> sources;
    for (std::size_t p = first; p < spec_.parameters.size(); ++p) {
      const ParameterSpec& parameter = spec_.parameters[p];
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
    pulled_.clear();
    std::vector<client::SliceSink> sinks;
    for (const client::SliceSource& source : Noise(1)) {
      pulled_.emplace_back(static_cast<std::size_t>(source.elements) * DtypeBytes(source.dtype),
                           '\xff');  // NaN: what does not come must show
      sinks.push_back({.parameter = source.parameter,
                       .slice = source.slice,
                       .elements = source.elements,
                       .dtype = source.dtype,
                       .place = {.device = gpu_}});
    }
    for (std::size_t i = 0; i < sinks.size(); ++i) sinks[i].data = pulled_[i].data();
    return sinks;
  }
  const std::vector<std::string>& pulled() const { return pulled_; }
  void Initialize() { ASSERT_TRUE(Must(session_->Initialize(Noise(1)))); }

 private:
  RunSpec spec_;
  RankSlices slices_;
  const int gpu_;
  std::vector<std::string> bytes_, pulled_;
  std::unique_ptr<client::Session> session_;
};

class NcclPaths : public ::testing::Test {
 protected:
  NcclPaths() { nccl::fake::Reset(); }
  ~NcclPaths() override {
    nccl::fake::SetFaults({});
    EXPECT_THAT(nccl::fake::Violations(), IsEmpty());
  }
};

TEST_F(NcclPaths, TwentyStepsWithASkipAreTheSameOverGrpcAndNccl) {
  PathDaemon first(WithNccl());
  Trainer by_grpc(OptionsFor(first, "grpc"));
  const Trained reference = TwentySteps(first, by_grpc, false);
  for (const bool one_call : {false, true}) {
    PathDaemon daemon(WithNccl());
    client::SessionOptions options = OptionsFor(daemon, "nccl");
    options.nccl_window_bytes = 4096;  // as large as the largest slice: a fill for each few
    Trainer trainer(options);
    EXPECT_EQ(trainer.path().name, "nccl");
    EXPECT_EQ(TwentySteps(daemon, trainer, one_call), reference) << one_call;
    EXPECT_GT(
        daemon.Metric("muond_transport_bytes_total{direction=\"rx\",transport=\"nccl\"}"), 0);
    EXPECT_GT(
        daemon.Metric("muond_transport_bytes_total{direction=\"tx\",transport=\"nccl\"}"), 0);
    EXPECT_EQ(daemon.Metric("muond_transport_bytes_total{direction=\"rx\",transport=\"grpc\"}"),
              0);
    EXPECT_EQ(daemon.Metric("muond_transport_connections{transport=\"nccl\"}"), 1);
  }
}

// The call takes its pair with it, and the pieces on their way through that: it is pulled again.
TEST_F(NcclPaths, AReplyThatIsLostAmongThePiecesOfAPullCostsNothing) {
  std::vector<Trained> trained;
  for (const char* faults : {"", "drop_pull_reply:7:2"}) {
    ServiceOptions service = WithNccl();
    service.fault_points = faults;
    PathDaemon daemon(service);
    auto options = OptionsFor(daemon, "nccl");
    options.nccl_window_bytes = 4096;
    Trainer trainer(options);
    nccl::fake::SetFaults({.polls = 50});  // pieces take longer than calls
    trained.push_back(TwentySteps(daemon, trainer, false));
    EXPECT_EQ(daemon.service().FaultsFired("drop_pull_reply"), *faults != 0 ? 2 : 0);
  }
  EXPECT_EQ(trained[0], trained[1]);
}

TEST_F(NcclPaths, SlicesByColumnsArePackedAndArrive) {
  std::vector<Trained> trained;
  for (const char* transport : {"grpc", "nccl"}) {
    PathDaemon daemon(WithNccl());
    Trainer trainer(OptionsFor(daemon, transport), {cluster::Cut::kCols, 3});
    trained.push_back(TwentySteps(daemon, trainer, true));
  }
  EXPECT_EQ(trained[0], trained[1]);
}

// The pair's windows were made for smaller slices than those that are added.
TEST_F(NcclPaths, WhatIsAddedLaterHasRoom) {
  std::vector<std::string> digests;
  for (const char* transport : {"grpc", "nccl"}) {
    PathDaemon daemon(WithNccl());
    client::SessionOptions options = OptionsFor(daemon, transport);
    options.nccl_window_bytes = 4096;
    Trainer trainer(options);
    trainer.Initialize();
    Must(trainer.session().Step({}, trainer.Noise(5)));
    trainer.Add({cluster::Matrix("w.late", 900, 600)});
    const StepOutcome outcome = Must(trainer.session().Step({}, trainer.Noise(6)));
    EXPECT_TRUE(outcome.applied);
    EXPECT_EQ(trainer.path().name, transport);
    Must(trainer.session().Pull(outcome.version, trainer.Sinks()));
    digests.push_back(DigestOf(daemon.service()));
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(NcclPaths, AutoTakesNcclWhereTheGpusAreTwoAndSaysSo) {
  PathDaemon daemon(WithNccl());
  Trainer trainer(OptionsFor(daemon, "auto"));
  EXPECT_EQ(trainer.path().name, "nccl");
  EXPECT_THAT(trainer.path().reason, HasSubstr("a GPU each"));
  EXPECT_EQ(daemon.Metric("muond_transport_choices_total{transport=\"nccl\"}"), 1);
}

absl::Status Refusal(const client::SessionOptions& options) {
  const RunSpec spec = SomeSpec();
  return client::Session::Open(spec, 0, cluster::CutOf(spec, {cluster::Cut::kRows, 1}, 0), options)
      .status();
}

TEST_F(NcclPaths, OneGpuIsRefusedWithTheReason) {
  PathDaemon daemon(WithNccl());
  const absl::Status status = Refusal(OptionsFor(daemon, "nccl", 99));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("NCCL refuses two ranks"));
}

TEST_F(NcclPaths, ADaemonWithoutNcclSaysWhyAndAutoGoesOn) {
  ServiceOptions options = WithNccl();
  options.nccl = "off";
  PathDaemon daemon(options);
  const absl::Status status = Refusal(OptionsFor(daemon, "nccl"));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("it is turned off"));
  Trainer trainer(OptionsFor(daemon, "auto"));
  EXPECT_NE(trainer.path().name, "nccl");
  trainer.Initialize();
  EXPECT_TRUE(Must(trainer.session().Step({}, trainer.Noise(5))).applied);
}

TEST_F(NcclPaths, AnEndThatMovesNothingIsNoPath) {
  PathDaemon daemon(WithNccl());
  nccl::fake::SetFaults({.move_nothing = true});
  // Whichever end looks first says what it found, and then does not answer the other.
  const auto found_out = testing::AnyOf(HasSubstr("what arrived is not what was sent"),
                                        HasSubstr("the peer did not answer in time"));
  const absl::Status status = Refusal(OptionsFor(daemon, "nccl"));
  EXPECT_THAT(std::string(status.message()), found_out);
  Trainer trainer(OptionsFor(daemon, "auto"));
  EXPECT_EQ(trainer.path().name, "grpc");
  EXPECT_THAT(trainer.path().reason, found_out);
}

TEST_F(NcclPaths, AnEndThatMovesNothingLaterIsNeverBelieved) {
  PathDaemon daemon(WithNccl());
  Trainer trainer(OptionsFor(daemon, "nccl"));
  trainer.Initialize();
  const std::string before = DigestOf(daemon.service());
  Must(trainer.session().Begin({.step = trainer.session().next_step(), .loss_scale = 1}));
  nccl::fake::SetFaults({.move_nothing = true});
  const absl::Status pushed = trainer.session().Push(trainer.Noise(5));
  EXPECT_EQ(pushed.code(), absl::StatusCode::kDataLoss) << pushed;
  EXPECT_THAT(std::string(pushed.message()), HasSubstr("announced"));
  const absl::Status pulled = trainer.session().Pull(0, trainer.Sinks());
  EXPECT_EQ(pulled.code(), absl::StatusCode::kDataLoss) << pulled;
  EXPECT_EQ(DigestOf(daemon.service()), before);
  nccl::fake::SetFaults({});
  Must(trainer.session().Push(trainer.Noise(5)));
  EXPECT_TRUE(Must(trainer.session().Finish()).applied);
}

TEST_F(NcclPaths, ABitThatFlipsIsSentAgainAndCountsOnce) {
  std::vector<std::string> digests;
  for (const bool flip : {false, true}) {
    PathDaemon daemon(WithNccl());
    Trainer trainer(OptionsFor(daemon, "nccl"));
    trainer.Initialize();
    for (int step = 0; step < 3; ++step) {
      nccl::fake::SetFaults({.flip_bit = flip});
      EXPECT_TRUE(Must(trainer.session().Step({}, trainer.Noise(5 + step))).applied);
    }
    digests.push_back(DigestOf(daemon.service()));
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(NcclPaths, TheSameAgainIsADuplicateAndOtherBytesAConflict) {
  PathDaemon daemon(WithNccl());
  Trainer trainer(OptionsFor(daemon, "nccl"));
  trainer.Initialize();
  Must(trainer.session().Begin({.step = trainer.session().next_step(), .loss_scale = 1}));
  Must(trainer.session().Push(trainer.Noise(5)));
  Must(trainer.session().Push(trainer.Noise(5)));
  const absl::Status other = trainer.session().Push(trainer.Noise(6));
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists) << other;
  // A refusal is an answer: the pair has received it all and goes on.
  EXPECT_EQ(nccl::fake::Count().aborts, 0);
  EXPECT_TRUE(Must(trainer.session().Finish()).applied);
}

TEST_F(NcclPaths, ALostReplyIsMadeUpForAndCountsOnce) {
  std::vector<std::string> digests;
  for (const char* faults : {"", "drop_push_reply:1:1,drop_finish_reply:1:1"}) {
    ServiceOptions options = WithNccl();
    options.fault_points = faults;
    PathDaemon daemon(options);
    Trainer trainer(OptionsFor(daemon, "nccl"));
    trainer.Initialize();
    for (int step = 0; step < 4; ++step) {
      EXPECT_TRUE(Must(trainer.session().Step({}, trainer.Noise(5 + step))).applied);
    }
    digests.push_back(DigestOf(daemon.service()));
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(NcclPaths, APeerKilledInAnExchangeIsAnErrorInTimeAndTheNextRunWorks) {
  PathDaemon daemon(WithNccl(absl::Seconds(2)));
  {
    client::SessionOptions options = OptionsFor(daemon, "nccl");
    options.nccl_timeout = absl::Seconds(2);
    options.bulk_timeout = absl::Seconds(4);
    options.call_timeout = absl::Seconds(4);
    Trainer trainer(options);
    trainer.Initialize();
    Must(trainer.session().Begin({.step = trainer.session().next_step(), .loss_scale = 1}));
    nccl::fake::SetFaults({.silent = kDaemonGpu});
    const absl::Time start = absl::Now();
    const absl::Status pushed = trainer.session().Push(trainer.Noise(5));
    EXPECT_FALSE(pushed.ok());
    EXPECT_LT(absl::Now() - start, absl::Seconds(15)) << pushed;
  }
  nccl::fake::SetFaults({});
  Trainer next(OptionsFor(daemon, "nccl"));
  Must(next.session().RaiseGeneration("the trainer was killed"));
  EXPECT_TRUE(Must(next.session().Step({}, next.Noise(5))).applied);
}

TEST_F(NcclPaths, ATrainerThatIsGoneGivesTheDaemonsMemoryBack) {
  PathDaemon daemon(WithNccl());
  for (int i = 0; i < 5; ++i) {
    Trainer trainer(OptionsFor(daemon, "nccl"));
    EXPECT_EQ(daemon.Metric("muond_transport_connections{transport=\"nccl\"}"), 1);
  }
  const auto holds = [&] {
    const auto count = nccl::fake::Count();
    return count.device_bytes > 0 || count.open_communicators > 0 || count.open_streams > 0 ||
           daemon.Metric("muond_transport_connections{transport=\"nccl\"}") > 0;
  };
  for (int i = 0; i < 3000 && holds(); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(daemon.Metric("muond_transport_connections{transport=\"nccl\"}"), 0);
  EXPECT_EQ(nccl::fake::Count().device_bytes, 0);
  EXPECT_EQ(nccl::fake::Count().open_communicators, 0);
  EXPECT_EQ(nccl::fake::Count().open_streams, 0);
}

TEST_F(NcclPaths, ADaemonThatStopsDoesNotWaitForItsPairs) {
  auto daemon = std::make_unique<PathDaemon>(WithNccl());
  Trainer trainer(OptionsFor(*daemon, "nccl"));
  const absl::Time start = absl::Now();
  daemon->service().Stop(absl::Seconds(30));
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
}

}  // namespace
}  // namespace muond::conformance
