// What every data path must do alike: carry every byte, apply a step once, lead to one state.
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::BoxBytes;
using cluster::Must;
using cluster::Tensors;
using testing::HasSubstr;

// Sizes that divide nothing, a tensor larger than an arena's windows, many small ones.
RunSpec SomeSpec() {
  std::vector<ParameterSpec> parameters = {cluster::Matrix("w.big", 256, 190),
                                           cluster::Matrix("w.odd", 37, 53),
                                           cluster::Vector("norm", 19)};
  for (int i = 0; i < 30; ++i) parameters.push_back(cluster::Vector("b" + std::to_string(i), 7));
  return cluster::SpecOf(std::move(parameters));
}

// One rank that holds every parameter in slices.
class Trainer {
 public:
  Trainer(const client::SessionOptions& options, RunSpec spec)
      : spec_(std::move(spec)),
        slices_(cluster::CutOf(spec_, {cluster::Cut::kCols, 3}, 0)),
        session_(Must(client::Session::Open(spec_, 0, slices_, options))) {}

  client::Session& session() { return *session_; }

  // Adds these and sends their values.
  void Add(const std::vector<ParameterSpec>& parameters) {
    RunSpec alone = spec_;
    alone.parameters = parameters;
    const RankSlices slices = cluster::CutOf(alone, {cluster::Cut::kCols, 3}, 0);
    Must(session_->AddParameters({.groups = {}, .parameters = parameters, .slices = slices}));
    const std::size_t first = spec_.parameters.size();
    spec_ = Extended(std::move(spec_), {}, parameters);
    slices_.insert(slices.begin(), slices.end());
    EXPECT_TRUE(Must(session_->Initialize(Sources(cluster::NoiseFor(spec_, 1), first))));
  }

  // The tensors as slices, of the parameters from `first` on; their bytes live until the next call.
  std::vector<client::SliceSource> Sources(const Tensors& tensors, std::size_t first = 0) {
    bytes_.clear();
    std::vector<client::SliceSource> sources;
    for (std::size_t p = first; p < spec_.parameters.size(); ++p) {
      const ParameterSpec& parameter = spec_.parameters[p];
      const std::vector<Box>& boxes = slices_.at(parameter.name);
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        bytes_.push_back(BoxBytes(boxes[i], *parameter.shape, tensors.at(parameter.name),
                                  parameter.dtype));
        sources.push_back({.parameter = parameter.name,
                           .slice = static_cast<std::int64_t>(i),
                           .data = nullptr,
                           .elements = boxes[i].Elements(),
                           .dtype = parameter.dtype});
      }
    }
    for (std::size_t i = 0; i < sources.size(); ++i) sources[i].data = bytes_[i].data();
    return sources;
  }

  // All slices of the present version, in the order of Sources, into buffers full of 0xff.
  absl::StatusOr<std::vector<std::string>> Pull(std::int64_t version) {
    std::vector<std::string> pulled;
    std::vector<client::SliceSink> sinks;
    for (const client::SliceSource& source : Sources(cluster::NoiseFor(spec_, 1))) {
      pulled.emplace_back(static_cast<std::size_t>(source.elements) * DtypeBytes(source.dtype),
                          '\xff');
      sinks.push_back({.parameter = source.parameter,
                       .slice = source.slice,
                       .data = nullptr,
                       .elements = source.elements,
                       .dtype = source.dtype});
    }
    for (std::size_t i = 0; i < sinks.size(); ++i) sinks[i].data = pulled[i].data();
    if (absl::Status status = session_->Pull(version, sinks); !status.ok()) return status;
    return pulled;
  }

  const RunSpec& spec() const { return spec_; }
  const std::vector<std::string>& bytes() const { return bytes_; }

 private:
  RunSpec spec_;
  RankSlices slices_;
  std::vector<std::string> bytes_;
  std::unique_ptr<client::Session> session_;
};

std::string DigestOf(Service& service, const std::string& run = "run") {
  return Must(client::Admin(service.channel(), absl::Seconds(30)).Digest(run)).tensor_digest();
}

// Twenty steps; the gradients of step 7 have an infinity.
std::string TwentySteps(Path path) {
  PathDaemon daemon;
  Trainer trainer(daemon.OptionsFor(path), SomeSpec());
  EXPECT_TRUE(Must(trainer.session().Initialize(
      trainer.Sources(cluster::NoiseFor(trainer.spec(), 1)))));
  for (int step = 0; step < 20; ++step) {
    Tensors gradients = cluster::NoiseFor(trainer.spec(), 100 + step);
    if (step == 7) gradients.at("w.odd")[11] = std::numeric_limits<float>::infinity();
    const StepOutcome outcome =
        Must(trainer.session().Step({}, trainer.Sources(gradients)));
    EXPECT_EQ(outcome.applied, step != 7);
    Must(trainer.Pull(outcome.version));
  }
  return DigestOf(daemon.service());
}

// Five steps; before the third come the largest tensor and a small one.
std::string StepsOfARunThatGrows(Path path) {
  PathDaemon daemon;
  Trainer trainer(daemon.OptionsFor(path), SomeSpec());
  EXPECT_TRUE(Must(trainer.session().Initialize(
      trainer.Sources(cluster::NoiseFor(trainer.spec(), 1)))));
  for (int step = 0; step < 5; ++step) {
    if (step == 2) trainer.Add({cluster::Matrix("late.big", 400, 201), cluster::Vector("late", 3)});
    const StepOutcome outcome = Must(trainer.session().Step(
        {}, trainer.Sources(cluster::NoiseFor(trainer.spec(), 100 + step))));
    EXPECT_TRUE(outcome.applied);
    Must(trainer.Pull(outcome.version));
  }
  const std::string chosen = trainer.session().transports()[0].name;
  for (const char* name : {"grpc", "arena", "inprocess", "pointer"}) {
    const double bytes = daemon.Metric(
        std::string("muond_transport_bytes_total{direction=\"rx\",transport=\"") + name + "\"}");
    EXPECT_EQ(bytes > 0, name == chosen) << name;
  }
  return DigestOf(daemon.service());
}

class TransportTest : public testing::TestWithParam<Path> {
 protected:
  PathDaemon daemon_;
  Trainer trainer_{daemon_.OptionsFor(GetParam()), SomeSpec()};

  void Initialize() {
    ASSERT_TRUE(Must(trainer_.session().Initialize(
        trainer_.Sources(cluster::NoiseFor(trainer_.spec(), 1)))));
  }
  std::vector<client::SliceSource> Gradients(std::uint64_t seed) {
    return trainer_.Sources(cluster::NoiseFor(trainer_.spec(), seed));
  }
};

TEST_P(TransportTest, ThePathIsTheOneThatWasAskedFor) {
  const std::vector<client::ChosenTransport> chosen = trainer_.session().transports();
  ASSERT_EQ(chosen.size(), 1u);
  const std::string names[] = {"grpc", "grpc", "arena", "pointer"};
  EXPECT_EQ(chosen[0].name, names[static_cast<int>(GetParam())]);
  EXPECT_FALSE(chosen[0].reason.empty());
  EXPECT_EQ(daemon_.Metric("muond_transport_choices_total{transport=\"" + chosen[0].name + "\"}"),
            1);
  // Bytes went that way and no other.
  Initialize();
  for (const char* name : {"grpc", "arena", "inprocess", "pointer"}) {
    const double bytes = daemon_.Metric(
        std::string("muond_transport_bytes_total{direction=\"rx\",transport=\"") + name + "\"}");
    EXPECT_EQ(bytes > 0, name == chosen[0].name) << name;
  }
}

TEST_P(TransportTest, ParametersThatAreAddedGoTheSameWay) {
  EXPECT_EQ(StepsOfARunThatGrows(GetParam()), StepsOfARunThatGrows(Path::kGrpcTcp));
}

TEST_P(TransportTest, TwentyStepsWithASkipLeadToTheStateOfAnyPath) {
  static const std::string& reference = *new std::string(TwentySteps(Path::kInProcess));
  EXPECT_EQ(TwentySteps(GetParam()), reference);
}

TEST_P(TransportTest, WhatIsPulledIsWhatWasPushedInEveryByte) {
  Initialize();
  const auto pulled = trainer_.Pull(0);
  ASSERT_TRUE(pulled.ok()) << pulled.status();
  EXPECT_EQ(*pulled, trainer_.bytes());
}

TEST_P(TransportTest, TheSameAgainIsADuplicateAndOtherBytesAConflict) {
  Initialize();
  Must(trainer_.session().Begin({}));
  const auto first = Gradients(5);
  Must(trainer_.session().Push(first));
  EXPECT_TRUE(trainer_.session().Push(first).ok());
  const absl::Status conflict = trainer_.session().Push(Gradients(6));
  EXPECT_EQ(conflict.code(), absl::StatusCode::kAlreadyExists) << conflict;
  EXPECT_TRUE(Must(trainer_.session().Finish()).applied);
}

TEST_P(TransportTest, OfAPullOfAVersionThatIsNotThereNothingIsLeft) {
  Initialize();
  EXPECT_EQ(trainer_.Pull(3).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(trainer_.Pull(0).ok());
}

TEST_P(TransportTest, GradientsPushedOneByOneInTheBackgroundMakeAStep) {
  Initialize();
  Must(trainer_.session().Begin({}));
  const auto gradients = Gradients(100);
  std::vector<std::shared_ptr<client::PushTicket>> tickets;
  for (std::size_t i = gradients.size(); i-- > 0;) {  // as backward makes them: last layer first
    tickets.push_back(Must(trainer_.session().PushAsync({&gradients[i], 1})));
  }
  EXPECT_TRUE(tickets.front()->Wait(absl::Seconds(60)).ok());
  EXPECT_TRUE(Must(trainer_.session().Finish()).applied);
  for (const auto& ticket : tickets) EXPECT_TRUE(ticket->done());
  const std::string digest = DigestOf(daemon_.service());

  PathDaemon other;
  Trainer whole(other.OptionsFor(Path::kInProcess), SomeSpec());
  Must(whole.session().Initialize(whole.Sources(cluster::NoiseFor(whole.spec(), 1))));
  Must(whole.session().Step({}, whole.Sources(cluster::NoiseFor(whole.spec(), 100))));
  EXPECT_EQ(DigestOf(other.service()), digest);
}

TEST_P(TransportTest, AFailureInTheBackgroundIsFinishsAnswer) {
  Initialize();
  Must(trainer_.session().Begin({}));
  Must(trainer_.session().Push(Gradients(5)));
  const auto other = Gradients(6);
  const auto ticket = Must(trainer_.session().PushAsync(other));
  EXPECT_EQ(ticket->Wait(absl::Seconds(60)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(trainer_.session().Finish().status().code(), absl::StatusCode::kAlreadyExists);
  // The step stands as it was: what was accepted first counts.
  Must(trainer_.session().Begin({}));
  EXPECT_TRUE(Must(trainer_.session().Finish()).applied);
}

TEST_P(TransportTest, ACancelledWaitEndsAtOnceAndTheStepGoesOn) {
  Initialize();
  Must(trainer_.session().Begin({}));
  auto gradients = Gradients(5);
  const client::SliceSource last = gradients.back();
  gradients.pop_back();
  Must(trainer_.session().Push(gradients));
  std::thread canceller([this] {
    absl::SleepFor(absl::Milliseconds(100));
    trainer_.session().Cancel();
  });
  const absl::Time start = absl::Now();
  const auto outcome = trainer_.session().Finish();  // a slice is missing: it would wait for long
  canceller.join();
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kCancelled) << outcome.status();
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  Must(trainer_.session().Push({&last, 1}));
  EXPECT_TRUE(Must(trainer_.session().Finish()).applied);
}

INSTANTIATE_TEST_SUITE_P(Paths, TransportTest, testing::ValuesIn(kAllPaths),
                         [](const auto& test) { return PathName(test.param); });

// ---- The choice -------------------------------------------------------------------------------

// The call that lets go of it may answer before the last user has.
bool FallsToZero(PathDaemon& daemon, const std::string& series) {
  for (int i = 0; i < 3000 && daemon.Metric(series) > 0; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  return daemon.Metric(series) == 0;
}

TEST(TransportChoiceTest, AutoTakesTheArenaOnOneHostAndCountsWhereItFallsBack) {
  PathDaemon daemon;
  client::SessionOptions options = daemon.OptionsFor(Path::kGrpcTcp);
  options.transport = "auto";  // over TCP, but the daemon is on this host
  Trainer trainer(options, SomeSpec());
  EXPECT_EQ(trainer.session().transports()[0].name, "arena");
  EXPECT_EQ(daemon.Metric("muond_transport_connections{transport=\"arena\"}"), 1);
  Must(trainer.session().Close());
  EXPECT_TRUE(FallsToZero(daemon, "muond_transport_connections{transport=\"arena\"}"));
}

TEST(TransportChoiceTest, AnArenaThatCantBeHadIsGrpcWithTheReasonOrARefusal) {
  PathDaemon daemon({.threads = 1, .max_arena_bytes = 128 * 1024});
  client::SessionOptions options = daemon.OptionsFor(Path::kGrpcUnix);
  options.transport = "auto";
  Trainer trainer(options, SomeSpec());
  const client::ChosenTransport chosen = trainer.session().transports()[0];
  EXPECT_EQ(chosen.name, "grpc");
  EXPECT_THAT(chosen.reason, HasSubstr("--max-arena-bytes"));
  EXPECT_EQ(daemon.Metric("muond_transport_fallbacks_total{from=\"arena\",reason=\"refused\","
                          "to=\"grpc\"}"),
            1);
  EXPECT_TRUE(Must(trainer.session().Initialize(
      trainer.Sources(cluster::NoiseFor(trainer.spec(), 1)))));

  options.transport = "arena";
  options.session = "";
  const auto forced = client::Session::Open(
      trainer.spec(), 0, cluster::CutOf(trainer.spec(), {cluster::Cut::kCols, 3}, 0), options);
  EXPECT_EQ(forced.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(forced.status().message()), HasSubstr("transport \"arena\""));
}

TEST(TransportChoiceTest, ASocketThatCantBeReachedIsAFallbackToo) {
  PathDaemon daemon;
  std::remove(daemon.arena_socket().c_str());
  client::SessionOptions options = daemon.OptionsFor(Path::kGrpcUnix);
  options.transport = "auto";
  Trainer trainer(options, SomeSpec());
  EXPECT_EQ(trainer.session().transports()[0].name, "grpc");
  EXPECT_THAT(trainer.session().transports()[0].reason, HasSubstr("cannot connect"));
  EXPECT_EQ(daemon.Metric("muond_transport_fallbacks_total{from=\"arena\",reason=\"not_attached\","
                          "to=\"grpc\"}"),
            1);
  EXPECT_TRUE(FallsToZero(daemon, "muond_memory_bytes{kind=\"arena\",location=\"host\"}"));
}

}  // namespace
}  // namespace muond::conformance
