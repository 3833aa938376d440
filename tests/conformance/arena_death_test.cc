// Trainers that die at every moment of an arena's life: real processes that kill themselves, or are
// killed. The daemon must let go of what they held and go on with whoever comes next.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "absl/time/clock.h"
#include "client/cpp/admin.h"
#include "client/cpp/arena.h"
#include "client/cpp/session.h"
#include "gtest/gtest.h"
#include "proto/channel.h"
#include "proto/crc32c.h"
#include "proto/steady_time.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/service_fixture.h"

extern char** environ;

namespace muond::conformance {
namespace {

using cluster::Floats;
using cluster::Must;

constexpr std::int64_t kElements = 64 * 96;
const char* const kMoments[] = {"registered", "opened",   "attached", "filled",
                                "half sent",  "sent",     "told",     "pulling"};

RunSpec OneMatrix() { return cluster::SpecOf({cluster::Matrix("w", 64, 96)}); }
RankSlices Whole(const RunSpec& spec) { return cluster::CutOf(spec, {}, 0); }

client::SliceSource SourceOf(const Floats& values) {
  return {.parameter = "w", .data = values.data(), .elements = kElements};
}

// ---- The trainer's process --------------------------------------------------------------------

// Does by hand what a session does, up to `moment`.
class MortalTrainer {
 public:
  MortalTrainer(std::string address, std::string moment)
      : channel_(MakeChannel(Target(address), std::int64_t{64} << 20)),
        stub_(v1::Optimizer::NewStub(channel_)),
        moment_(std::move(moment)),
        address_(std::move(address)) {}

  void Live() {
    client::SessionOptions options;
    options.endpoint = address_;
    options.transport = "grpc";
    const auto session = Must(client::Session::Open(OneMatrix(), 0, Whole(OneMatrix()), options));
    DieAt("registered");
    Must(session->Begin({}));
    client::ArenaRequest request{.rank = 0, .window_bytes = 64 * 1024, .windows = 2, .socket = ""};
    request.id.set_run("run");
    request.id.set_generation(session->generation());
    if (moment_ == "opened") Open(request);
    std::string handle;
    arena_ = Must(client::ArenaLink::Attach(*stub_, request, SteadyNow() + absl::Seconds(30),
                                            &handle));
    DieAt("attached");
    Push(request.id, session->next_step());
    Pull(request.id, session->next_step());
  }

 private:
  static std::string Target(const std::string& address) {
    return "unix:" + address.substr(std::strlen("unix://"));
  }
  void DieAt(const std::string& moment) const {
    if (moment_ == moment) raise(SIGKILL);
  }
  void Open(const client::ArenaRequest& request) {
    v1::OpenArenaRequest open;
    *open.mutable_id() = request.id;
    open.set_window_bytes(request.window_bytes);
    open.set_windows(request.windows);
    v1::OpenArenaReply reply;
    grpc::ClientContext context;
    MUOND_CHECK(stub_->OpenArena(&context, open, &reply).ok(), "OpenArena");
    DieAt("opened");
  }

  void Push(const v1::RunId& id, std::int64_t step) {
    const Floats gradient = cluster::Noise(kElements, 77);  // never counted: it dies before Finish
    client::ArenaLink::Window& window = arena_->outgoing()[0];
    std::memcpy(arena_->memory().data() + window.place.offset(), gradient.data(), kElements * 4);
    arena_->memory().Set(window.place.filled(), 1);
    DieAt("filled");
    v1::PushRequest message;
    *message.mutable_id() = id;
    message.set_step(step);
    v1::ArenaFill* fill = message.mutable_fill();
    fill->set_arena(arena_->handle());
    fill->set_window(window.index);
    fill->set_sequence(1);
    v1::Chunk* chunk = fill->add_chunks();
    chunk->set_parameter("w");
    const std::int64_t sent = moment_ == "half sent" ? kElements / 2 : kElements;
    chunk->set_crc32c(Crc32c(gradient.data(), sent * 4));
    chunk->mutable_region()->set_offset(window.place.offset());
    chunk->mutable_region()->set_bytes(sent * 4);
    grpc::ClientContext context;
    v1::PushReply reply;
    const auto writer = stub_->Push(&context, &reply);
    writer->Write(message);
    DieAt("half sent");
    DieAt("sent");
    if (moment_ != "told") {
      context.TryCancel();
      writer->Finish();
      return;
    }
    while (arena_->memory().Get(window.place.drained()) != 1) {
      arena_->memory().WaitWhile(window.place.drained(), 0, absl::Seconds(1));
    }
    DieAt("told");
  }

  void Pull(const v1::RunId& id, std::int64_t version) {
    grpc::ClientContext context;
    const auto stream = stub_->PullArena(&context);
    v1::PullArenaRequest request;
    *request.mutable_pull()->mutable_id() = id;
    request.mutable_pull()->set_version(version);
    request.mutable_pull()->set_chunk_bytes(4096);
    request.set_arena(arena_->handle());
    stream->Write(request);
    v1::PullReply reply;
    MUOND_CHECK(stream->Read(&reply), stream->Finish().error_message());
    DieAt("pulling");
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Optimizer::Stub> stub_;
  const std::string moment_, address_;
  std::shared_ptr<client::ArenaLink> arena_;
};

// Not a test: what the tests below run in a process of its own.
TEST(ArenaTrainerProcess, DISABLED_Live) {
  const char* const address = std::getenv("MUOND_TEST_ADDRESS");
  const char* const moment = std::getenv("MUOND_TEST_MOMENT");
  if (address == nullptr || moment == nullptr) GTEST_SKIP() << "is run by the other tests";
  if (std::string(moment) != "any") {
    MortalTrainer(address, moment).Live();
    return;
  }
  // Pushes and pulls for ever, until it is killed. The step is never finished.
  client::SessionOptions options;
  options.endpoint = address;
  options.transport = "arena";
  options.arena_window_bytes = 64 * 1024;
  const auto session = Must(client::Session::Open(OneMatrix(), 0, Whole(OneMatrix()), options));
  const Floats gradient = cluster::Noise(kElements, 77);
  Floats weights(kElements);
  const client::SliceSource source = SourceOf(gradient);
  const client::SliceSink sink{.parameter = "w", .data = weights.data(), .elements = kElements};
  Must(session->Begin({}));
  for (;;) {
    Must(session->Push({&source, 1}));
    Must(session->Pull(session->next_step(), {&sink, 1}));
  }
}

pid_t SpawnTrainer(const std::string& address, const std::string& moment) {
  std::string program = "/proc/self/exe";
  std::string filter = "--gtest_filter=ArenaTrainerProcess.DISABLED_Live";
  std::string disabled = "--gtest_also_run_disabled_tests";
  char* const arguments[] = {program.data(), filter.data(), disabled.data(), nullptr};
  setenv("MUOND_TEST_ADDRESS", address.c_str(), 1);
  setenv("MUOND_TEST_MOMENT", moment.c_str(), 1);
  pid_t pid = -1;
  MUOND_CHECK(posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments, environ) == 0,
              "cannot start a trainer");
  return pid;
}

// ---- The daemon's process ---------------------------------------------------------------------

class ArenaDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    options_ = daemon_.OptionsFor(Path::kArena);
    session_ = Must(client::Session::Open(OneMatrix(), 0, Whole(OneMatrix()), options_));
    const Floats initial = cluster::Noise(kElements, 1);
    const client::SliceSource source = SourceOf(initial);
    ASSERT_TRUE(Must(session_->Initialize({&source, 1})));
    session_.reset();
  }

  bool Eventually(const std::function<bool()>& condition) {
    const absl::Time until = SteadyNow() + absl::Seconds(60);
    while (!condition() && SteadyNow() < until) absl::SleepFor(absl::Milliseconds(10));
    return condition();
  }
  bool NothingHeld() {
    return daemon_.Metric("muond_transport_connections{transport=\"arena\"}") == 0 &&
           daemon_.Metric("muond_memory_bytes{kind=\"arena\",location=\"host\"}") == 0;
  }

  // A new trainer takes the next step with its own gradients, through an arena.
  void StepOn() {
    session_ = Must(client::Session::Open(OneMatrix(), 0, Whole(OneMatrix()), options_));
    ASSERT_EQ(session_->transports()[0].name, "arena");
    if (step_in_flight_) Must(session_->RaiseGeneration("the trainer lost its gradients"));
    const Floats gradient = cluster::Noise(kElements, 1000 + session_->next_step());
    const client::SliceSource source = SourceOf(gradient);
    EXPECT_TRUE(Must(session_->Step({}, {&source, 1})).applied);
    session_.reset();
  }

  // What a trainer that nothing disturbs comes to.
  std::string DigestOfUndisturbed(int steps) {
    PathDaemon other;
    const auto session = Must(client::Session::Open(OneMatrix(), 0, Whole(OneMatrix()),
                                                    other.OptionsFor(Path::kInProcess)));
    const Floats initial = cluster::Noise(kElements, 1);
    const client::SliceSource values = SourceOf(initial);
    Must(session->Initialize({&values, 1}));
    for (int step = 0; step < steps; ++step) {
      const Floats gradient = cluster::Noise(kElements, 1000 + step);
      const client::SliceSource source = SourceOf(gradient);
      Must(session->Step({}, {&source, 1}));
    }
    return Digest(other.service());
  }
  static std::string Digest(Service& service) {
    return Must(client::Admin(service.channel(), absl::Seconds(30)).Digest("run"))
        .tensor_digest();
  }

  PathDaemon daemon_;
  client::SessionOptions options_;
  std::unique_ptr<client::Session> session_;
  bool step_in_flight_ = true;
};

TEST_F(ArenaDeathTest, ATrainerThatDiesAtAnyMomentHoldsNothingAndTheNextOneGoesOn) {
  int steps = 0;
  for (const std::string moment : kMoments) {
    SCOPED_TRACE(moment);
    int status = 0;
    const pid_t pid = SpawnTrainer(daemon_.unix_address(), moment);
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    EXPECT_TRUE(Eventually([this] { return NothingHeld(); }));
    StepOn();
    ++steps;
  }
  EXPECT_EQ(Digest(daemon_.service()), DigestOfUndisturbed(steps));
}

TEST_F(ArenaDeathTest, ATrainerThatIsKilledWhileItPushesAndPullsHoldsNothing) {
  constexpr int kKills = 6;
  for (int i = 0; i < kKills; ++i) {
    SCOPED_TRACE(i);
    const double before =
        daemon_.Metric("muond_transport_bytes_total{direction=\"tx\",transport=\"arena\"}");
    const pid_t pid = SpawnTrainer(daemon_.unix_address(), "any");
    EXPECT_TRUE(Eventually([&] {
      return daemon_.Metric("muond_transport_bytes_total{direction=\"tx\",transport=\"arena\"}") >
             before;
    }));
    absl::SleepFor(absl::Milliseconds(7 * i));  // another moment each time
    kill(pid, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(Eventually([this] { return NothingHeld(); }));
    StepOn();
  }
  EXPECT_EQ(Digest(daemon_.service()), DigestOfUndisturbed(kKills));
}

}  // namespace
}  // namespace muond::conformance
