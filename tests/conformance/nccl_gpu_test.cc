// NCCL on two real GPUs: trainers on one, the daemon on the other, in processes of their own.
// Skipped, loudly, where there are not two; MUOND_REQUIRE_GPU=1 makes that a failure.
//
// A trainer, or a daemon that is to be killed, is this program again, told by the environment what
// to do (Child below).
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/devices.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Must;
using cluster::Tensors;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

RunSpec SomeSpec(int world) {
  return cluster::SpecOf({cluster::Matrix("w.big", 1024, 1536), cluster::Matrix("w.odd", 37, 53),
                          cluster::Vector("norm", 1019)},
                         world);
}

// As large as a model of a billion parameters, in as many tensors; elements of AdamW, which is quick.
RunSpec LargeSpec(std::int64_t millions) {
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 16; ++i) {
    parameters.push_back(cluster::Vector("layer." + std::to_string(i) + ".w", millions << 16));
    parameters.push_back(cluster::Vector("layer." + std::to_string(i) + ".norm", 2048));
  }
  return cluster::SpecOf(std::move(parameters));
}

// One rank with all its buffers on a GPU.
class DeviceTrainer {
 public:
  DeviceTrainer(client::SessionOptions options, RunSpec spec, int rank)
      : driver_(Must(client::LoadGpuDriver())), spec_(std::move(spec)), gpu_(options.gpu) {
    const int world = static_cast<int>(spec_.world_size);
    slices_ = cluster::CutOf(spec_, {cluster::Cut::kRows, world}, rank);
    session_ = Must(client::Session::Open(spec_, rank, slices_, options));
    for (const ParameterSpec& parameter : spec_.parameters) {
      const auto held = slices_.find(parameter.name);
      if (held == slices_.end()) continue;
      for (std::size_t i = 0; i < held->second.size(); ++i) {
        const std::int64_t elements = held->second[i].Elements();
        const std::size_t bytes = static_cast<std::size_t>(elements) * 4;
        void* const gradient = driver_->Allocate(gpu_, bytes);
        void* const values = driver_->Allocate(gpu_, bytes);
        MUOND_CHECK(gradient != nullptr && values != nullptr, "device memory");
        const auto slice = static_cast<std::int64_t>(i);
        sources_.push_back({.parameter = parameter.name,
                            .slice = slice,
                            .data = gradient,
                            .elements = elements,
                            .place = {.device = gpu_}});
        sinks_.push_back({.parameter = parameter.name,
                          .slice = slice,
                          .data = values,
                          .elements = elements,
                          .place = {.device = gpu_}});
      }
    }
  }
  ~DeviceTrainer() {
    session_.reset();
    for (const auto& source : sources_) driver_->Free(gpu_, const_cast<void*>(source.data));
    for (const auto& sink : sinks_) driver_->Free(gpu_, sink.data);
  }

  client::Session& session() { return *session_; }
  std::span<const client::SliceSink> sinks() const { return sinks_; }
  std::span<const client::SliceSource> sources() const { return sources_; }

  std::span<const client::SliceSource> Sources(const Tensors& tensors) {
    for (const client::SliceSource& source : sources_) {
      const ParameterSpec& parameter = *std::find_if(
          spec_.parameters.begin(), spec_.parameters.end(),
          [&](const ParameterSpec& p) { return p.name == source.parameter; });
      const std::string bytes = cluster::BoxBytes(
          slices_.at(source.parameter)[static_cast<std::size_t>(source.slice)], *parameter.shape,
          tensors.at(source.parameter), Dtype::kF32);
      Must(driver_->Copy(source.place, const_cast<void*>(source.data), bytes.data(),
                         bytes.size()));
      Must(driver_->Wait(source.place));
    }
    return sources_;
  }
  std::span<const client::SliceSource> Noise(int seed) {
    return Sources(cluster::NoiseFor(spec_, seed));
  }
  std::string Parameters() {
    std::string all;
    for (const client::SliceSink& sink : sinks_) {
      std::string bytes(static_cast<std::size_t>(sink.elements) * 4, '\0');
      Must(driver_->Copy(sink.place, bytes.data(), sink.data, bytes.size()));
      Must(driver_->Wait(sink.place));
      all += bytes;
    }
    return all;
  }
  const RunSpec& spec() const { return spec_; }

 private:
  const std::shared_ptr<client::GpuDriver> driver_;
  const RunSpec spec_;
  const int gpu_;
  RankSlices slices_;
  std::vector<client::SliceSource> sources_;
  std::vector<client::SliceSink> sinks_;
  std::unique_ptr<client::Session> session_;
};

// Twenty steps, one of them skipped; the parameters after the last.
std::string TwentySteps(DeviceTrainer& trainer) {
  Must(trainer.session().Initialize(trainer.Noise(1)));
  for (int step = 0; step < 20; ++step) {
    Tensors gradients = cluster::NoiseFor(trainer.spec(), 100 + step);
    if (step == 7) gradients.at("w.odd")[11] = std::numeric_limits<float>::infinity();
    const StepOutcome outcome =
        Must(trainer.session().StepAndPull({}, trainer.Sources(gradients), trainer.sinks()));
    MUOND_CHECK(outcome.applied == (step != 7), "step 7 is skipped and no other");
  }
  return trainer.Parameters();
}

// Zeros would do for the bytes; NaN must not.
void Fill(DeviceTrainer& trainer) {
  const auto driver = Must(client::LoadGpuDriver());
  for (const client::SliceSource& source : trainer.sources()) {
    const cluster::Floats noise = cluster::Noise(std::min<std::int64_t>(source.elements, 1 << 20), 3);
    for (std::int64_t at = 0; at < source.elements; at += std::ssize(noise)) {
      const std::int64_t n = std::min<std::int64_t>(std::ssize(noise), source.elements - at);
      Must(driver->Copy(source.place,
                        static_cast<char*>(const_cast<void*>(source.data)) + at * 4, noise.data(),
                        static_cast<std::size_t>(n) * 4));
    }
    Must(driver->Wait(source.place));
  }
}

// What pushes and pulls of a model of that size take, and whole steps.
void Measure(client::SessionOptions options, std::int64_t millions, int steps) {
  DeviceTrainer trainer(options, LargeSpec(millions), 0);
  Fill(trainer);
  Must(trainer.session().Initialize(trainer.sources()));
  double bytes = 0;
  for (const auto& source : trainer.sources()) bytes += static_cast<double>(source.elements) * 4;
  std::vector<double> push, pull, step;
  for (int i = 0; i < steps + 2; ++i) {
    Must(trainer.session().Begin({}));
    const absl::Time start = absl::Now();
    Must(trainer.session().Push(trainer.sources()));
    const absl::Time pushed = absl::Now();
    const StepOutcome outcome = Must(trainer.session().Finish());
    const absl::Time finished = absl::Now();
    Must(trainer.session().Pull(outcome.version, trainer.sinks()));
    const absl::Time pulled = absl::Now();
    Must(trainer.session().StepAndPull({}, trainer.sources(), trainer.sinks()));
    if (i < 2) continue;
    push.push_back(absl::ToDoubleSeconds(pushed - start));
    pull.push_back(absl::ToDoubleSeconds(pulled - finished));
    step.push_back(absl::ToDoubleSeconds(absl::Now() - pulled));
  }
  const auto median = [](std::vector<double>& of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
  };
  const double a = median(push), b = median(pull), c = median(step);
  std::printf("%-5s %.2f GB: push %.2f ms %.1f GB/s, pull %.2f ms %.1f GB/s, step and pull %.2f ms "
              "(medians of %d)\n",
              trainer.session().transports()[0].name.c_str(), bytes / 1e9, a * 1e3, bytes / a / 1e9,
              b * 1e3, bytes / b / 1e9, c * 1e3, steps);
  std::fflush(stdout);
}

[[noreturn]] void Die() {
  kill(getpid(), SIGKILL);
  std::abort();
}

// What another process does; not a test by itself.
TEST(Child, DISABLED_Process) {
  const std::string what = Variable("MUOND_NCCL_CHILD");
  client::SessionOptions options;
  options.endpoint = Variable("MUOND_NCCL_ENDPOINT");
  options.transport = Variable("MUOND_NCCL_TRANSPORT");
  options.gpu = std::atoi(Variable("MUOND_NCCL_GPU").c_str());
  options.call_timeout = absl::Seconds(60);
  const int rank = std::atoi(Variable("MUOND_NCCL_RANK").c_str());
  const int world = std::max(1, std::atoi(Variable("MUOND_NCCL_WORLD").c_str()));
  if (what == "daemon") {
    ServiceOptions service{.backend = "cuda", .devices = {"1"}, .listen = {options.endpoint}};
    const auto running = Must(Service::Start(service));
    for (;;) pause();
  }
  if (what == "measure") {
    return Measure(options, std::atoi(Variable("MUOND_NCCL_MILLIONS").c_str()),
                   std::atoi(Variable("MUOND_NCCL_STEPS").c_str()));
  }
  if (what == "die") {
    DeviceTrainer trainer(options, LargeSpec(64), 0);
    Fill(trainer);
    if (trainer.session().state() == v1::RUN_STATE_OPENING) {
      Must(trainer.session().Initialize(trainer.sources()));
    }
    Must(trainer.session().Begin({}));
    std::thread([] {
      std::this_thread::sleep_for(
          std::chrono::microseconds(std::atoi(Variable("MUOND_NCCL_DIE_US").c_str())));
      Die();
    }).detach();
    for (;;) Must(trainer.session().Push(trainer.sources()));
  }
  if (what == "recover") {
    DeviceTrainer trainer(options, LargeSpec(64), 0);
    Fill(trainer);
    MUOND_CHECK(trainer.session().transports()[0].name == options.transport, "the path");
    Must(trainer.session().StepAndPull({}, trainer.sources(), trainer.sinks()));
    return;
  }
  DeviceTrainer trainer(options, SomeSpec(world), rank);
  for (const client::ChosenTransport& chosen : trainer.session().transports()) {
    std::printf("rank %d, daemon %s: %s (%s)\n", rank, chosen.daemon.c_str(), chosen.name.c_str(),
                chosen.reason.c_str());
  }
  if (options.transport != "auto") {
    MUOND_CHECK(trainer.session().transports()[0].name == options.transport, "the path");
  }
  const std::string parameters = TwentySteps(trainer);
  std::ofstream(Variable("MUOND_NCCL_OUT"), std::ios::binary) << parameters;
}

using Environment = std::vector<std::pair<std::string, std::string>>;

pid_t StartChild(const std::string& what, const std::string& endpoint,
                 const std::string& transport, const Environment& more = {}) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  setenv("MUOND_NCCL_CHILD", what.c_str(), 1);
  setenv("MUOND_NCCL_ENDPOINT", endpoint.c_str(), 1);
  setenv("MUOND_NCCL_TRANSPORT", transport.c_str(), 1);
  setenv("MUOND_NCCL_GPU", "0", 1);
  for (const auto& [name, value] : more) setenv(name.c_str(), value.c_str(), 1);
  execl("/proc/self/exe", "nccl_gpu_test", "--gtest_filter=Child.DISABLED_Process",
        "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
  _exit(99);
}

// The exit status, or minus the signal.
int Wait(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string DigestOf(Service& service) {
  return Must(client::Admin(service.channel(), absl::Seconds(60)).Digest("run")).tensor_digest();
}

class NcclGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const kernels::CudaDevices list = kernels::ListCudaDevices();
    if (list.devices.size() < 2) {
      ASSERT_TRUE(Variable("MUOND_REQUIRE_GPU").empty()) << "two GPUs are needed";
      GTEST_SKIP() << "two GPUs are needed, here are " << list.devices.size() << ". "
                   << list.why_none;
    }
    Restart();
  }
  void Restart(absl::Duration deadline = absl::Seconds(20)) {
    daemon_.reset();
    ServiceOptions options{.backend = "cuda", .devices = {"1"}};
    options.nccl_deadline = deadline;
    daemon_ = std::make_unique<PathDaemon>(options);
  }
  double Pairs() { return daemon_->Metric("muond_transport_connections{transport=\"nccl\"}"); }

  std::unique_ptr<PathDaemon> daemon_;
};

TEST_F(NcclGpu, TwentyStepsWithASkipAreTheSameOverGrpcNcclIpcAndPointers) {
  const std::string out = "/tmp/muond-nccl-" + std::to_string(getpid());
  std::string digest, parameters;
  const std::vector<std::pair<std::string, std::string>> ways = {
      {"grpc", "0"}, {"nccl", "0"}, {"cuda-ipc", "1"}, {"pointer", "1"}};
  for (const auto& [path, gpu] : ways) {
    Restart();
    if (path == "pointer") {
      client::SessionOptions options;
      options.channel = daemon_->service().channel();
      options.gpu = 1;
      DeviceTrainer trainer(options, SomeSpec(1), 0);
      EXPECT_EQ(trainer.session().transports()[0].name, "pointer");
      std::ofstream(out, std::ios::binary) << TwentySteps(trainer);
    } else {
      ASSERT_EQ(Wait(StartChild("train", daemon_->unix_address(), path,
                                {{"MUOND_NCCL_OUT", out}, {"MUOND_NCCL_GPU", gpu}})),
                0);
    }
    std::printf("%-8s from GPU %s to GPU 1: digest %s\n", path.c_str(), gpu.c_str(),
                DigestOf(daemon_->service()).c_str());
    if (digest.empty()) {
      digest = DigestOf(daemon_->service());
      parameters = Contents(out);
    }
    EXPECT_EQ(DigestOf(daemon_->service()), digest);
    EXPECT_EQ(Contents(out), parameters);
    std::filesystem::remove(out);
  }
}

TEST_F(NcclGpu, AutoTakesIt) {
  const std::string out = "/tmp/muond-nccl-" + std::to_string(getpid());
  ASSERT_EQ(Wait(StartChild("train", daemon_->unix_address(), "auto", {{"MUOND_NCCL_OUT", out}})),
            0);
  EXPECT_EQ(daemon_->Metric("muond_transport_choices_total{transport=\"nccl\"}"), 1);
  std::filesystem::remove(out);
}

TEST_F(NcclGpu, OneGpuIsRefusedWithTheReason) {
  client::SessionOptions options;
  options.endpoint = daemon_->unix_address();
  options.transport = "nccl";
  options.gpu = 1;
  const RunSpec spec = SomeSpec(1);
  const absl::Status status =
      client::Session::Open(spec, 0, cluster::CutOf(spec, {cluster::Cut::kRows, 1}, 0), options)
          .status();
  std::printf("%s\n", status.ToString().c_str());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(NcclGpu, ATrainerThatIsKilledInATransferLeavesTheDaemonAndItsGpuWell) {
  for (const char* us : {"3000", "20000", "100000"}) {
    const pid_t trainer =
        StartChild("die", daemon_->unix_address(), "nccl", {{"MUOND_NCCL_DIE_US", us}});
    EXPECT_EQ(Wait(trainer), -SIGKILL);
    const absl::Time start = absl::Now();
    while (Pairs() > 0 && absl::Now() - start < absl::Seconds(30)) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    std::printf("killed after %s us: the pair was gone after %.2f s\n", us,
                absl::ToDoubleSeconds(absl::Now() - start));
    EXPECT_EQ(Pairs(), 0);
    EXPECT_TRUE(daemon_->service().CheckAlive(absl::Seconds(10)).ok());
    EXPECT_EQ(Wait(StartChild("recover", daemon_->unix_address(), "nccl")), 0);
  }
}

TEST_F(NcclGpu, ADaemonThatIsKilledInATransferIsAnErrorInTimeAndTheNextOneServes) {
  const std::string directory = "/tmp/muond-nccl-" + std::to_string(getpid());
  std::filesystem::create_directory(directory);
  const std::string address = "unix://" + directory + "/muond.sock";
  for (int round = 0; round < 2; ++round) {
    const pid_t daemon = StartChild("daemon", address, "");
    client::SessionOptions options;
    options.endpoint = address;
    options.transport = "nccl";
    options.gpu = 0;
    options.call_timeout = absl::Seconds(round == 0 ? 20 : 60);
    options.bulk_timeout = absl::Seconds(10);
    options.nccl_timeout = absl::Seconds(5);
    DeviceTrainer trainer(options, LargeSpec(64), 0);
    Fill(trainer);
    Must(trainer.session().Initialize(trainer.sources()));
    Must(trainer.session().Begin({}));
    std::thread killer([&] {
      absl::SleepFor(absl::Milliseconds(30));
      kill(daemon, SIGKILL);
    });
    absl::Status status;
    absl::Time last = absl::Now();
    while (status.ok()) {
      last = absl::Now();
      status = trainer.session().Push(trainer.sources());
    }
    std::printf("the daemon was killed: error after %.2f s: %s\n",
                absl::ToDoubleSeconds(absl::Now() - last), status.ToString().c_str());
    EXPECT_LT(absl::Now() - last, absl::Seconds(30));
    killer.join();
    Wait(daemon);
  }
  std::filesystem::remove_all(directory);
}

TEST_F(NcclGpu, TwoDaemonsOnTwoGpusWithTrainersOnBoth) {
  const std::string out = "/tmp/muond-nccl-" + std::to_string(getpid()) + "-";
  std::vector<std::string> digests;
  for (const char* transport : {"grpc", "auto"}) {
    cluster::Cluster daemons(2, {.backend = "cuda", .devices = {"0"}}, [](int daemon,
                                                                         ServiceOptions& options) {
      options.devices = {std::to_string(daemon)};
    });
    std::vector<pid_t> trainers;
    for (const char* rank : {"0", "1"}) {
      trainers.push_back(StartChild("train", daemons.endpoint(0), transport,
                                    {{"MUOND_NCCL_OUT", out + rank},
                                     {"MUOND_NCCL_GPU", rank},
                                     {"MUOND_NCCL_RANK", rank},
                                     {"MUOND_NCCL_WORLD", "2"}}));
    }
    for (const pid_t trainer : trainers) EXPECT_EQ(Wait(trainer), 0);
    digests.push_back(DigestOf(daemons.service(0)));
    std::printf("two daemons, two trainers, %s: digest %s\n", transport, digests.back().c_str());
    for (const char* rank : {"0", "1"}) std::filesystem::remove(out + rank);
  }
  EXPECT_EQ(digests[0], digests[1]);
}

// MUOND_NCCL_MILLIONS: parameters of the model, MUOND_NCCL_STEPS: rounds.
TEST_F(NcclGpu, RatesBesideGrpc) {
  if (Variable("MUOND_NCCL_MILLIONS").empty()) setenv("MUOND_NCCL_MILLIONS", "64", 1);
  if (Variable("MUOND_NCCL_STEPS").empty()) setenv("MUOND_NCCL_STEPS", "3", 1);
  for (const char* transport : {"nccl", "grpc"}) {
    Restart();
    EXPECT_EQ(Wait(StartChild("measure", daemon_->unix_address(), transport)), 0);
  }
}

}  // namespace
}  // namespace muond::conformance
