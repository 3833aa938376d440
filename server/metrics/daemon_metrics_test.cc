#include "server/metrics/daemon_metrics.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/exposition_for_test.h"

namespace muond {
namespace {

using testing::HasSubstr;
using Samples = std::map<std::string, double>;

const BuildInfo kBuild{"0.1.0", "abc123", "none", "g++ 12.2.0"};

const std::vector<std::string> kMethods = {"Register", "Initialize", "Begin", "Push", "Finish",
                                           "Skip", "Pull", "Close", "RaiseGeneration", "Status",
                                           "DescribeParameters", "Digest"};

// A daemon as it serves: all methods known.
std::unique_ptr<DaemonMetrics> MakeDaemon() {
  auto metrics = std::make_unique<DaemonMetrics>(kBuild);
  for (const std::string& method : kMethods) metrics->Rpc("muond.v1.Optimizer", method, "unary");
  for (const char* method : {"Watch", "LastSteps", "Settings", "Drain"}) {
    metrics->Rpc("muond.v1.Admin", method, "unary");
  }
  for (const char* method : {"Hello", "Vote", "Prepare", "Raise", "StateHashes"}) {
    metrics->Rpc("muond.v1.Peer", method, "unary");
  }
  metrics->Rpc("grpc.health.v1.Health", "Check", "unary");
  metrics->Rpc("grpc.health.v1.Health", "Watch", "server_stream");
  return metrics;
}

StepOutcome Applied(std::int64_t step) {
  StepOutcome outcome;
  outcome.step = step;
  outcome.applied = true;
  return outcome;
}

Samples Scrape(const DaemonMetrics& metrics) { return ParseExposition(metrics.Serialize()); }

TEST(DaemonMetrics, DescribesItsBuild) {
  EXPECT_THAT(DaemonMetrics(kBuild).Serialize(),
              HasSubstr("muond_build_info{compiler=\"g++ 12.2.0\",cuda=\"none\","
                        "revision=\"abc123\",version=\"0.1.0\"} 1\n"));
}

TEST(DaemonMetrics, IsNotReadyUntilToldSo) {
  DaemonMetrics metrics(kBuild);
  EXPECT_FALSE(metrics.ready());
  EXPECT_EQ(Scrape(metrics)["muond_ready"], 0);
  metrics.SetReady(true);
  EXPECT_TRUE(metrics.ready());
  EXPECT_EQ(Scrape(metrics)["muond_ready"], 1);
}

TEST(DaemonMetrics, CountsTransfersErrorsAndLogLines) {
  DaemonMetrics metrics(kBuild);
  metrics.OnTransfer(TransportPath::kGrpc, TransportDirection::kReceived, 1000);
  metrics.OnTransfer(TransportPath::kGrpc, TransportDirection::kReceived, 24);
  metrics.OnTransfer(TransportPath::kGrpc, TransportDirection::kSent, 7);
  metrics.OnTransportError(TransportPath::kGrpc, TransportError::kChecksum);
  metrics.OnLogMessage(LogSeverity::kWarning);
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["muond_transport_bytes_total{direction=\"rx\",transport=\"grpc\"}"], 1024);
  EXPECT_EQ(samples["muond_transport_messages_total{direction=\"rx\",transport=\"grpc\"}"], 2);
  EXPECT_EQ(samples["muond_transport_bytes_total{direction=\"tx\",transport=\"grpc\"}"], 7);
  EXPECT_EQ(samples["muond_transport_errors_total{reason=\"checksum\",transport=\"grpc\"}"], 1);
  EXPECT_EQ(samples["muond_transport_errors_total{reason=\"no_memory\",transport=\"grpc\"}"], 0);
  EXPECT_EQ(samples["muond_log_messages_total{severity=\"warning\"}"], 1);
  EXPECT_EQ(samples["muond_log_messages_total{severity=\"critical\"}"], 0);
}

TEST(DaemonMetrics, ObservesPhasesAndSumsMemory) {
  DaemonMetrics metrics(kBuild);
  metrics.ObservePhase(StepPhase::kNewtonSchulz, absl::Milliseconds(3));
  metrics.AddMemory(MemoryKind::kMomentum, 4096);
  metrics.AddMemory(MemoryKind::kMomentum, 100);
  metrics.AddMemory(MemoryKind::kMomentum, -4096);
  Samples samples = Scrape(metrics);
  EXPECT_EQ(samples["muond_step_phase_seconds_count{phase=\"newton_schulz\"}"], 1);
  EXPECT_EQ(samples["muond_step_phase_seconds_bucket{phase=\"newton_schulz\",le=\"0.002\"}"], 0);
  EXPECT_EQ(samples["muond_step_phase_seconds_bucket{phase=\"newton_schulz\",le=\"0.004\"}"], 1);
  EXPECT_EQ(samples["muond_step_phase_seconds_count{phase=\"send\"}"], 0);
  EXPECT_EQ(samples["muond_memory_bytes{kind=\"momentum\",location=\"host\"}"], 100);
}

TEST(DaemonMetrics, CountsCallsByMethodAndCode) {
  DaemonMetrics metrics(kBuild);
  RpcMetrics& push = metrics.Rpc("muond.v1.Optimizer", "Push", "client_stream");
  EXPECT_EQ(&push, &metrics.Rpc("muond.v1.Optimizer", "Push", "client_stream"));
  push.OnStarted();
  push.OnHandled(absl::StatusCode::kDataLoss, absl::Milliseconds(2));
  push.OnHandled(static_cast<absl::StatusCode>(99), absl::Milliseconds(2));
  Samples samples = Scrape(metrics);
  const std::string method =
      "grpc_method=\"Push\",grpc_service=\"muond.v1.Optimizer\",grpc_type=\"client_stream\"}";
  EXPECT_EQ(samples["grpc_server_started_total{" + method], 1);
  EXPECT_EQ(samples["grpc_server_handled_total{grpc_code=\"DataLoss\"," + method], 1);
  EXPECT_EQ(samples["grpc_server_handled_total{grpc_code=\"Unknown\"," + method], 1);
  EXPECT_EQ(samples["grpc_server_handled_total{grpc_code=\"OK\"," + method], 0);
  EXPECT_EQ(samples["grpc_server_handling_seconds_count{" + method], 2);
}

TEST(DaemonMetrics, ReportsTheProcess) {
  DaemonMetrics metrics(kBuild);
  Samples samples = Scrape(metrics);
  EXPECT_GT(samples["process_start_time_seconds"], 1.6e9);
  EXPECT_LE(samples["process_start_time_seconds"], absl::ToUnixSeconds(absl::Now()) + 2);
  EXPECT_GT(samples["process_resident_memory_bytes"], 1e6);
  EXPECT_GE(samples["process_virtual_memory_bytes"], samples["process_resident_memory_bytes"]);
  EXPECT_GE(samples["process_max_fds"], samples["process_open_fds"]);
  const double before = samples["process_open_fds"];
  EXPECT_GT(before, 0);
  const std::ifstream another("/proc/self/status");
  EXPECT_EQ(Scrape(metrics)["process_open_fds"], before + 1);
}

// observability.md's budget: what a scrape costs is known beforehand.
TEST(DaemonMetrics, StaysWithinTheSeriesBudget) {
  const auto metrics = MakeDaemon();
  for (const std::string& method : kMethods) {  // every call, ended in every way there is
    for (int code = 0; code <= 16; ++code) {
      metrics->Rpc("muond.v1.Optimizer", method, "unary")
          .OnHandled(static_cast<absl::StatusCode>(code), absl::ZeroDuration());
    }
  }
  const std::size_t daemon = CountPlainSeries(Scrape(*metrics));
  EXPECT_LE(daemon, 400u);
  const auto bare = metrics->OpenRun({.run = "bare", .loss_scale_min = 1});
  const std::size_t run = CountPlainSeries(Scrape(*metrics)) - daemon;
  EXPECT_LE(run, 64u);
  const auto grouped = metrics->OpenRun({.run = "grouped", .groups = {"g"}, .loss_scale_min = 1});
  EXPECT_LE(CountPlainSeries(Scrape(*metrics)) - daemon - 2 * run, 16u);
}

// litellm PR #27272 and its kind: series that grow with what clients send.
TEST(DaemonMetrics, Litellm27272_SeriesDoNotGrowWithParametersStepsOrGroups) {
  const auto metrics = MakeDaemon();
  const std::size_t idle = Scrape(*metrics).size();
  const auto series_of = [&](std::int64_t parameters, int groups, int steps) {
    std::vector<std::unique_ptr<RunMetrics>> runs;
    for (int i = 0; i < 3; ++i) {
      RunMetrics::Opening opening{.run = absl::StrFormat("run-%d", i)};
      for (int g = 0; g < groups; ++g) opening.groups.push_back(absl::StrFormat("g%d", g));
      auto run = metrics->OpenRun(opening);
      run->SetParameters(std::vector<RunMetrics::GroupParameters>(groups, {.muon = parameters}));
      for (int step = 0; step < steps; ++step) {
        run->OnStepBegin(absl::UnixEpoch());
        run->OnOutcome(Applied(step), RunMetrics::ScaleMove::kNone,
                       absl::UnixEpoch());
        const std::vector<double> values(parameters, 0.5);
        run->ObserveMeasures(
            0, {.cosines = values, .update_ratios = values, .residuals = values});
        for (const auto measure : {RunMetrics::Measure::kResidual,
                                   RunMetrics::Measure::kUpdateRatio,
                                   RunMetrics::Measure::kGradNorm}) {
          run->SetWorst(measure, values);
        }
      }
      runs.push_back(std::move(run));
    }
    return Scrape(*metrics).size();
  };
  EXPECT_EQ(series_of(10, 2, 1), series_of(10'000, 2, 500));
  EXPECT_EQ(series_of(10, kMaxGroupSeries + 1, 1), series_of(10, 5'000, 1));
  EXPECT_EQ(Scrape(*metrics).size(), idle) << "closed runs leave nothing";
}

// prometheus-cpp PR #322, #580: children removed while they are collected.
TEST(DaemonMetrics, PrometheusCpp322_RunsComeAndGoWhileScraped) {
  const auto metrics = MakeDaemon();
  const std::size_t idle = Scrape(*metrics).size();
  std::atomic<bool> stop = false;
  std::vector<std::jthread> threads;
  for (int worker = 0; worker < 8; ++worker) {
    threads.emplace_back([&, worker] {
      while (!stop) {
        // Every second worker shares its run's name with another.
        auto run =
            metrics->OpenRun({.run = absl::StrFormat("run-%d", worker / 2), .groups = {"g"}});
        run->OnStepBegin(absl::UnixEpoch());
        run->OnGroupCommit(0, {.calls = 1, .updates = 1});
        run->OnOutcome(Applied(0), RunMetrics::ScaleMove::kNone,
                       absl::UnixEpoch());
      }
    });
  }
  for (int scrape = 0; scrape < 200; ++scrape) {
    ASSERT_THAT(metrics->Serialize(), HasSubstr("muond_ready 0\n"));
  }
  stop = true;
  threads.clear();
  EXPECT_EQ(Scrape(*metrics).size(), idle);
}

// What promtool says about `exposition`, line by line; empty when it has no complaint.
std::vector<std::string> PromtoolComplaints(const std::string& exposition) {
  const std::string file = testing::TempDir() + absl::StrFormat("exposition-%d.txt", getpid());
  std::ofstream(file) << exposition;
  FILE* promtool = popen(("promtool check metrics < " + file + " 2>&1").c_str(), "r");
  std::vector<std::string> lines;
  char line[1024];
  while (std::fgets(line, sizeof(line), promtool) != nullptr) lines.emplace_back(line);
  if (pclose(promtool) != 0 && lines.empty()) lines.emplace_back("promtool failed without a word");
  std::remove(file.c_str());
  return lines;
}

TEST(DaemonMetrics, PassesPromtool) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool (Debian: prometheus) is not installed: the exposition is unchecked";
  }
  const auto metrics = MakeDaemon();
  const auto run =
      metrics->OpenRun({.run = "r", .groups = {"hidden", "rest"}, .loss_scale_min = 1});
  run->OnOutcome(Applied(0), RunMetrics::ScaleMove::kNone, absl::UnixEpoch());
  EXPECT_THAT(PromtoolComplaints(metrics->Serialize()), testing::IsEmpty());
  // The check can fail.
  EXPECT_THAT(PromtoolComplaints("# TYPE muond_steps counter\nmuond_steps 1\n"),
              testing::Not(testing::IsEmpty()));
}

}  // namespace
}  // namespace muond
