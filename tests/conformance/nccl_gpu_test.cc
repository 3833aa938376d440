// NCCL on two real GPUs: trainers on one, the daemon on the other, in processes of their own.
// Skipped, loudly, where there are not two; MUOND_REQUIRE_GPU=1 makes that a failure.
//
// A trainer, or a daemon that is to be killed, is this program again, told by the environment what
// to do (RunChild).
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "client/cpp/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/devices.h"
#include "nccl/cuda/cuda_device.h"
#include "nccl/library.h"
#include "nccl/link.h"
#include "proto/steady_time.h"
#include "tests/conformance/nccl_gpu_trainer.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Must;

// Not a test by itself.
TEST(Child, DISABLED_Process) { RunChild(); }

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
    options.nccl = "auto";
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

// On all that there are: each rank goes to its own GPU's daemon by CUDA IPC, to the others by NCCL.
TEST_F(NcclGpu, ADaemonAndATrainerOnEveryGpuEndInTheStateOfOne) {
  daemon_.reset();
  const int all = static_cast<int>(kernels::ListCudaDevices().devices.size());
  const std::string out = "/tmp/muond-nccl-" + std::to_string(getpid()) + "-";
  std::vector<std::string> digests;
  for (const auto& [gpus, transport] :
       std::vector<std::pair<int, std::string>>{{1, "grpc"}, {all, "grpc"}, {all, "auto"}}) {
    cluster::Cluster daemons(gpus, {.backend = "cuda"}, [](int daemon, ServiceOptions& options) {
      options.devices = {std::to_string(daemon)};
      options.nccl = "auto";
    });
    std::vector<pid_t> trainers;
    for (int rank = 0; rank < gpus; ++rank) {
      trainers.push_back(StartChild("train", daemons.endpoint(0), transport,
                                    {{"MUOND_NCCL_OUT", out + std::to_string(rank)},
                                     {"MUOND_NCCL_GPU", std::to_string(rank)},
                                     {"MUOND_NCCL_RANK", std::to_string(rank)},
                                     {"MUOND_NCCL_WORLD", std::to_string(gpus)}}));
    }
    for (const pid_t trainer : trainers) EXPECT_EQ(Wait(trainer), 0);
    for (int daemon = 0; daemon < gpus && transport == "auto"; ++daemon) {
      EXPECT_EQ(MetricOf(daemons.service(daemon),
                         "muond_transport_choices_total{transport=\"nccl\"}"),
                gpus - 1);
    }
    digests.push_back(DigestOf(daemons.service(0)));
    std::printf("%d daemons, %d trainers, %s: digest %s\n", gpus, gpus, transport.c_str(),
                digests.back().c_str());
    for (int rank = 0; rank < gpus; ++rank) std::filesystem::remove(out + std::to_string(rank));
  }
  EXPECT_EQ(digests[1], digests[0]);
  EXPECT_EQ(digests[2], digests[0]);
}

// What NCCL by itself moves from one GPU to the other, a GiB at a time, both ranks in this process.
void PrintBareRate() {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  constexpr int kRounds = 8;
  const nccl::Library* const library = Must(nccl::Load());
  nccl::UniqueId id{};
  library->api.get_unique_id(&id);
  const std::vector<kernels::CudaDevice> gpus = kernels::ListCudaDevices().devices;
  const absl::Time deadline = SteadyNow() + absl::Seconds(30);
  struct End {
    std::unique_ptr<nccl::Worker> worker;
    std::shared_ptr<nccl::Link> link;
    void* memory = nullptr;
  };
  std::array<End, 2> ends;
  for (int rank : {0, 1}) {
    End& end = ends[rank];
    auto device = Must(nccl::OpenCudaDevice(gpus[rank].uuid));
    end.memory = Must(device->Allocate(kBytes));
    end.worker = std::make_unique<nccl::Worker>(library->api, std::move(device));
    end.link = end.worker->Connect(id, rank, deadline, [](const absl::Status&) {});
  }
  std::vector<double> seconds;
  for (int round = 0; round < kRounds + 2; ++round) {
    const absl::Time start = absl::Now();
    std::array<std::promise<absl::Status>, 2> done;
    for (int rank : {0, 1}) {
      nccl::Exchange exchange{.deadline = deadline};
      (rank == 0 ? exchange.sends : exchange.receives) = {{ends[rank].memory, kBytes}};
      exchange.done = [&done, rank](const absl::Status& status) { done[rank].set_value(status); };
      ASSERT_TRUE(ends[rank].link->Post(std::move(exchange)).ok());
    }
    for (auto& end : done) ASSERT_TRUE(end.get_future().get().ok());
    if (round >= 2) seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf("bare  1 GiB from GPU 0 to GPU 1: %.1f GB/s (median of %d)\n",
              kBytes / seconds[kRounds / 2] / 1e9, kRounds);
  for (End& end : ends) end.worker->device().Free(end.memory);
}

// MUOND_NCCL_MILLIONS: parameters of the model, MUOND_NCCL_STEPS: rounds.
TEST_F(NcclGpu, RatesBesideGrpc) {
  if (Variable("MUOND_NCCL_MILLIONS").empty()) setenv("MUOND_NCCL_MILLIONS", "64", 1);
  if (Variable("MUOND_NCCL_STEPS").empty()) setenv("MUOND_NCCL_STEPS", "3", 1);
  PrintBareRate();
  for (const char* transport : {"nccl", "grpc"}) {
    Restart();
    // gRPC takes seconds for what NCCL does in milliseconds.
    const bool slow = std::string(transport) == "grpc";
    EXPECT_EQ(Wait(StartChild("measure", daemon_->unix_address(), transport,
                              slow ? Environment{{"MUOND_NCCL_STEPS", "1"}} : Environment{})),
              0);
  }
}

}  // namespace
}  // namespace muond::conformance
