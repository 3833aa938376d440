// CUDA IPC on a real GPU: a daemon in this process, trainers in others. Skipped, loudly, where
// there is no GPU; MUOND_REQUIRE_GPU=1 makes that a failure.
//
// A trainer is this program again, told by the environment what to do (Child below).
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/devices.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {
namespace {

using cluster::Must;
using cluster::Tensors;

RunSpec SomeSpec() {
  return cluster::SpecOf({cluster::Matrix("w.big", 512, 768), cluster::Matrix("w.odd", 37, 53),
                          cluster::Vector("norm", 1019)});
}

// One rank with all its buffers on the GPU.
class DeviceTrainer {
 public:
  explicit DeviceTrainer(client::SessionOptions options)
      : driver_(Must(client::LoadGpuDriver())), spec_(SomeSpec()) {
    options.gpu = 0;
    session_ = Must(client::Session::Open(
        spec_, 0, cluster::CutOf(spec_, {cluster::Cut::kRows, 1}, 0), options));
    for (const ParameterSpec& parameter : spec_.parameters) {
      const std::int64_t elements = WholeBox(*parameter.shape).Elements();
      const std::size_t bytes = static_cast<std::size_t>(elements) * 4;
      void* const gradient = driver_->Allocate(0, bytes);
      void* const values = driver_->Allocate(0, bytes);
      MUOND_CHECK(gradient != nullptr && values != nullptr, "device memory");
      sources_.push_back({.parameter = parameter.name,
                          .data = gradient,
                          .elements = elements,
                          .place = {.device = 0}});
      sinks_.push_back({.parameter = parameter.name,
                        .data = values,
                        .elements = elements,
                        .place = {.device = 0}});
    }
  }
  ~DeviceTrainer() {
    for (const auto& source : sources_) driver_->Free(0, const_cast<void*>(source.data));
    for (const auto& sink : sinks_) driver_->Free(0, sink.data);
  }

  client::Session& session() { return *session_; }
  const RunSpec& spec() const { return spec_; }
  std::span<const client::SliceSink> sinks() const { return sinks_; }

  std::span<const client::SliceSource> Sources(const Tensors& tensors) {
    for (const client::SliceSource& source : sources_) {
      const auto& values = tensors.at(source.parameter);
      Must(driver_->Copy(source.place, const_cast<void*>(source.data), values.data(),
                         values.size() * 4));
      Must(driver_->Wait(source.place));
    }
    return sources_;
  }
  std::span<const client::SliceSource> Noise(int seed) {
    return Sources(cluster::NoiseFor(spec_, seed));
  }
  std::vector<float> Parameter(std::size_t index) {
    std::vector<float> values(static_cast<std::size_t>(sinks_[index].elements));
    Must(driver_->Copy(sinks_[index].place, values.data(), sinks_[index].data, values.size() * 4));
    Must(driver_->Wait(sinks_[index].place));
    return values;
  }

 private:
  const std::shared_ptr<client::GpuDriver> driver_;
  const RunSpec spec_;
  std::vector<client::SliceSource> sources_;
  std::vector<client::SliceSink> sinks_;
  std::unique_ptr<client::Session> session_;
};

// Twenty steps, one of them skipped; writes the last parameters' bytes to `out`.
void TwentySteps(DeviceTrainer& trainer, const std::string& out, bool one_call) {
  Must(trainer.session().Initialize(trainer.Noise(1)));
  for (int step = 0; step < 20; ++step) {
    Tensors gradients = cluster::NoiseFor(trainer.spec(), 100 + step);
    if (step == 7) gradients.at("w.odd")[11] = std::numeric_limits<float>::infinity();
    const auto sources = trainer.Sources(gradients);
    StepOutcome outcome;
    if (one_call) {
      outcome = Must(trainer.session().StepAndPull({}, sources, trainer.sinks()));
    } else {
      outcome = Must(trainer.session().Step({}, sources));
      Must(trainer.session().Pull(outcome.version, trainer.sinks()));
    }
    MUOND_CHECK(outcome.applied == (step != 7), "step 7 is skipped and no other");
  }
  std::ofstream file(out, std::ios::binary);
  for (std::size_t i = 0; i < trainer.sinks().size(); ++i) {
    const std::vector<float> values = trainer.Parameter(i);
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * 4));
  }
}

// Ends this process as an operator's or the kernel's kill does.
[[noreturn]] void Die() {
  kill(getpid(), SIGKILL);
  std::abort();
}

void DieSoon() {
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::microseconds(400));
    Die();
  }).detach();
}

void DieAt(DeviceTrainer& trainer, const std::string& moment) {
  if (moment == "attached") Die();
  if (trainer.session().state() == v1::RUN_STATE_OPENING) {
    if (moment == "initializing") DieSoon();
    Must(trainer.session().Initialize(trainer.Noise(1)));
  }
  if (moment == "initializing") Die();
  Must(trainer.session().Begin({}));
  if (moment == "begun") Die();
  const auto sources = trainer.Noise(5);
  if (moment == "pushing") DieSoon();
  Must(trainer.session().Push(sources));
  if (moment == "pushed" || moment == "pushing") Die();
  if (moment == "finishing") DieSoon();
  const StepOutcome outcome = Must(trainer.session().Finish());
  if (moment == "finished" || moment == "finishing") Die();
  DieSoon();
  Must(trainer.session().Pull(outcome.version, trainer.sinks()));
  Die();
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// What a trainer's process does; not a test by itself.
TEST(Child, DISABLED_Trainer) {
  const std::string what = Variable("MUOND_IPC_CHILD");
  client::SessionOptions options;
  options.endpoint = Variable("MUOND_IPC_ENDPOINT");
  options.transport = Variable("MUOND_IPC_TRANSPORT");
  if (what == "attach") {
    for (int i = 0; i < std::atoi(Variable("MUOND_IPC_COUNT").c_str()); ++i) {
      DeviceTrainer trainer(options);
      MUOND_CHECK(trainer.session().transports()[0].name == "cuda-ipc", "the path");
    }
    return;
  }
  DeviceTrainer trainer(options);
  MUOND_CHECK(trainer.session().transports()[0].name == options.transport, "the path");
  if (what == "train") {
    return TwentySteps(trainer, Variable("MUOND_IPC_OUT"),
                       Variable("MUOND_IPC_ONE_CALL") == "1");
  }
  if (what == "recover") {
    if (trainer.session().state() == v1::RUN_STATE_OPENING) {
      Must(trainer.session().Initialize(trainer.Noise(1)));
    }
    for (int step = 0; step < 2; ++step) {
      Must(trainer.session().StepAndPull({}, trainer.Noise(5), trainer.sinks()));
    }
    Must(trainer.session().Close());
    return;
  }
  DieAt(trainer, what);
}

class GpuIpc : public ::testing::Test {
 protected:
  void SetUp() override {
    const kernels::CudaDevices list = kernels::ListCudaDevices();
    if (list.devices.empty()) {
      ASSERT_TRUE(Variable("MUOND_REQUIRE_GPU").empty()) << list.why_none;
      GTEST_SKIP() << "no GPU: " << list.why_none;
    }
    kernels::Error error;
    backend_ = kernels::MakeCudaBackend(0, {}, error);
    ASSERT_NE(backend_, nullptr) << error.message();
    daemon_ = std::make_unique<PathDaemon>(ServiceOptions{.backend = "cuda", .devices = {"0"}});
  }

  // The exit status of a trainer's process, or minus the signal that ended it.
  int RunChild(const std::string& what, const std::string& transport,
               const std::vector<std::pair<std::string, std::string>>& more = {}) {
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("MUOND_IPC_CHILD", what.c_str(), 1);
      setenv("MUOND_IPC_ENDPOINT", daemon_->unix_address().c_str(), 1);
      setenv("MUOND_IPC_TRANSPORT", transport.c_str(), 1);
      for (const auto& [name, value] : more) setenv(name.c_str(), value.c_str(), 1);
      execl("/proc/self/exe", "gpu_ipc_test", "--gtest_filter=Child.DISABLED_Trainer",
            "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
      _exit(99);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

  double Arenas() {
    return daemon_->Metric("muond_memory_bytes{kind=\"gpu_arena\",location=\"device\"}");
  }
  void WaitForNoArena() {
    for (int i = 0; i < 500 && Arenas() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(Arenas(), 0);
  }
  std::string Digest() {
    return Must(client::Admin(daemon_->service().channel(), absl::Seconds(30)).Digest("run"))
        .tensor_digest();
  }

  std::unique_ptr<kernels::Backend> backend_;  // for its FreeBytes
  std::unique_ptr<PathDaemon> daemon_;
};

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(GpuIpc, TwentyStepsWithASkipAreTheSameOverGrpcIpcAndPointers) {
  std::string digest, parameters;
  const std::vector<std::pair<std::string, std::string>> ways = {
      {"grpc", "0"}, {"cuda-ipc", "0"}, {"cuda-ipc", "1"}, {"pointer", "0"}, {"pointer", "1"}};
  for (const auto& [path, one_call] : ways) {
    daemon_ = std::make_unique<PathDaemon>(ServiceOptions{.backend = "cuda", .devices = {"0"}});
    const std::string out = "/tmp/muond-ipc-" + std::to_string(getpid());
    if (path == "pointer") {
      client::SessionOptions options;
      options.channel = daemon_->service().channel();
      DeviceTrainer trainer(options);
      EXPECT_EQ(trainer.session().transports()[0].name, "pointer");
      TwentySteps(trainer, out, one_call == "1");
    } else {
      ASSERT_EQ(RunChild("train", path,
                         {{"MUOND_IPC_OUT", out}, {"MUOND_IPC_ONE_CALL", one_call}}),
                0);
    }
    std::printf("%-8s one call %s: digest %s\n", path.c_str(), one_call.c_str(), Digest().c_str());
    if (digest.empty()) {
      digest = Digest();
      parameters = Contents(out);
    }
    EXPECT_EQ(Digest(), digest);
    EXPECT_EQ(Contents(out), parameters);
    std::filesystem::remove(out);
  }
}

TEST_F(GpuIpc, ATrainerThatIsKilledAtAnyMomentLeavesTheDaemonWellAndItsMemoryComesBack) {
  ASSERT_EQ(RunChild("recover", "cuda-ipc"), 0);  // contexts and workspaces are there from now on
  WaitForNoArena();
  const std::size_t before = backend_->FreeBytes();
  for (const char* moment : {"attached", "initializing", "begun", "pushing", "pushed", "finishing",
                             "finished", "pulling"}) {
    EXPECT_EQ(RunChild(moment, "cuda-ipc"), -SIGKILL) << moment;
    WaitForNoArena();
    EXPECT_TRUE(daemon_->service().CheckAlive(absl::Seconds(10)).ok()) << moment;
    // The rank comes back, finishes what was begun, and goes.
    EXPECT_EQ(RunChild("recover", "cuda-ipc"), 0) << moment;
  }
  WaitForNoArena();
  const std::size_t after = backend_->FreeBytes();
  std::printf("free before %zu, after 8 kills %zu bytes\n", before, after);
  EXPECT_GE(after + (std::size_t{32} << 20), before);
}

TEST_F(GpuIpc, AThousandAttachmentsTakeNothing) {
  ASSERT_EQ(RunChild("attach", "cuda-ipc", {{"MUOND_IPC_COUNT", "5"}}), 0);
  WaitForNoArena();
  const std::size_t before = backend_->FreeBytes();
  ASSERT_EQ(RunChild("attach", "cuda-ipc", {{"MUOND_IPC_COUNT", "1000"}}), 0);
  WaitForNoArena();
  const std::size_t after = backend_->FreeBytes();
  std::printf("free before %zu, after 1000 attachments %zu bytes\n", before, after);
  EXPECT_GE(after + (std::size_t{2} << 20), before);
}

}  // namespace
}  // namespace muond::conformance
