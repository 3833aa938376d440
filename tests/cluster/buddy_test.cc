// Buddies: a daemon that comes back empty is brought to the last step, without a disk.
#include <array>
#include <chrono>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/checkpoint.grpc.pb.h"
#include "tests/cluster/checkpoint_story.h"

namespace muond::cluster {
namespace {

constexpr std::int64_t kEnd = 9;

ServiceOptions WithBuddies(std::int64_t steps) {
  ServiceOptions options{.threads = 1, .peer_patience = absl::Milliseconds(500)};
  options.buddy_steps = steps;
  return options;
}

// Of one daemon that nothing happens to.
std::string Undisturbed(const RunSpec& spec) {
  auto service = StartService();
  TestRun run(*service, spec);
  Story(run, 0, kEnd);
  return run.TensorDigest();
}

// The value of the one series of /metrics that begins so; -1: there is none.
double Value(Service& service, const std::string& series) {
  for (const absl::string_view line : absl::StrSplit(service.Metrics(), '\n')) {
    if (!absl::StartsWith(line, series)) continue;
    return std::stod(std::string(line.substr(line.rfind(' ') + 1)));
  }
  return -1;
}

// To a daemon that may die: by its address, not within this process.
std::shared_ptr<grpc::Channel> To(const Cluster& cluster, int daemon) {
  return grpc::CreateChannel(cluster.endpoint(daemon), grpc::InsecureChannelCredentials());
}

// How many devices a service has that is started, or comes back, while this lives.
class TestDevices {
 public:
  explicit TestDevices(int count) {
    setenv("MUOND_TEST_DEVICES", std::to_string(count).c_str(), 1);
  }
  ~TestDevices() { unsetenv("MUOND_TEST_DEVICES"); }
};

void DieAndComeBack(Cluster& cluster, int victim) {
  cluster.Stop(victim);
  cluster.Start(victim);
}

struct BuddyCase {
  int daemons = 2;
  std::int64_t steps = 1;
};

class BuddyRecovery : public ::testing::TestWithParam<BuddyCase> {};
INSTANTIATE_TEST_SUITE_P(Of, BuddyRecovery,
                         ::testing::Values(BuddyCase{2, 1}, BuddyCase{3, 2}, BuddyCase{3, 4},
                                           BuddyCase{5, 100}),
                         [](const auto& info) {
                           return absl::StrFormat("%dDaemons%dSteps", info.param.daemons,
                                                  info.param.steps);
                         });

// After every step another one dies, skips and absent parameters among them.
TEST_P(BuddyRecovery, NoStepIsLostWhoeverDies) {
  Cluster cluster(GetParam().daemons, WithBuddies(GetParam().steps));
  TestRun run(To(cluster, 0), StorySpec(true), {.call_timeout = absl::Seconds(20)});
  for (std::int64_t step = 0; step < kEnd; ++step) {
    StoryStep(run, step);
    const int victim = static_cast<int>((step * 2 + 1) % GetParam().daemons);
    DieAndComeBack(cluster, victim);
    const absl::Status back = run.session().AwaitRestore(absl::Seconds(60));
    ASSERT_TRUE(back.ok()) << back;
    ASSERT_EQ(run.session().next_step(), step + 1) << "daemon " << victim;
  }
  EXPECT_EQ(run.TensorDigest(), Undisturbed(StorySpec(true)));
}

// Gradients of several ranks and micro-batches are kept as their sum, those of one as they came.
TEST(Buddies, SumsAndHalfPrecisionAndDevicesComeBackToo) {
  const TestDevices devices(2);
  RunSpec spec = StorySpec();
  spec.world_size = 2;
  for (ParameterSpec& parameter : spec.parameters) {
    parameter.dtype = Dtype::kBF16;
    parameter.replicated = parameter.name != "a";
  }
  Cluster cluster(2, WithBuddies(3));
  TestRun run(To(cluster, 0), spec, {.call_timeout = absl::Seconds(20)});
  auto service = StartService();
  TestRun calm(*service, spec);
  for (std::int64_t step = 0; step < 4; ++step) {
    const Tensors gradients = NoiseFor(spec, step);
    EXPECT_EQ(run.Step(gradients), calm.Step(gradients));
  }
  DieAndComeBack(cluster, 1);
  std::thread other([&] { Must(run.session(1).AwaitRestore(absl::Seconds(60))); });
  Must(run.session(0).AwaitRestore(absl::Seconds(60)));
  other.join();
  EXPECT_EQ(run.session().next_step(), 4);
  EXPECT_EQ(run.TensorDigest(), calm.TensorDigest());
  const Tensors gradients = NoiseFor(spec, 4);
  EXPECT_EQ(run.Step(gradients), calm.Step(gradients));
  EXPECT_EQ(run.TensorDigest(), calm.TensorDigest());
}

// Two snapshots of the other's state at most while one is on its way, and no more gradients than
// were asked for; beside them the copy that one's own snapshot is sent from.
TEST(Buddies, WhatIsHeldIsBounded) {
  constexpr std::int64_t kSteps = 3;
  Cluster cluster(2, WithBuddies(kSteps));
  TestRun run(To(cluster, 0), StorySpec(true));
  std::array<double, 2> state{}, elements{};
  for (int daemon = 0; daemon < 2; ++daemon) {
    for (const char* kind : {"master", "momentum", "second_moment"}) {
      state[daemon] += Value(cluster.service(daemon),
                             absl::StrFormat("muond_memory_bytes{kind=\"%s\"", kind));
    }
    elements[daemon] = Value(cluster.service(daemon), "muond_shard_elements{");
  }
  double sent = 0;
  for (std::int64_t step = 0; step < 12; ++step) {
    run.Step(NoiseFor(run.spec(), step));
    for (int daemon = 0; daemon < 2; ++daemon) {
      const int owner = 1 - daemon;
      const double held =
          Value(cluster.service(daemon), "muond_memory_bytes{kind=\"buddy\"");
      EXPECT_GT(held, 0);
      EXPECT_LE(held, state[daemon] + 2 * state[owner] + kSteps * elements[owner] * sizeof(float));
    }
    const double now = Value(cluster.service(0), "muond_buddy_sent_bytes_total{");
    EXPECT_GE(now - sent, elements[0] * sizeof(float)) << "a step's gradients went out";
    sent = now;
  }
  EXPECT_EQ(Value(cluster.service(0), "muond_buddy_wait_seconds_count{"), 12);
}

class TwoDeaths : public ::testing::Test {
 protected:
  // Owner 1 and its buddy 2 at once; then until the run goes on.
  void OwnerAndBuddyDie(Cluster& cluster) {
    for (const int victim : {1, 2}) cluster.Stop(victim);
    for (const int victim : {1, 2}) cluster.Start(victim);
  }
};

TEST_F(TwoDeaths, FallBackToTheCheckpoint) {
  CheckpointDirectory directory;
  ServiceOptions options = WithBuddies(4);
  options.checkpoint_dir = directory.path();
  Cluster cluster(3, options);
  TestRun run(To(cluster, 0), StorySpec(), {.call_timeout = absl::Seconds(20)});
  Story(run, 0, 2);
  Must(run.admin().SaveCheckpoint("run"));
  Story(run, 2, 4);
  OwnerAndBuddyDie(cluster);
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  EXPECT_EQ(run.session().next_step(), 2);
  // It is counted when all daemons have it, and trainers may be faster.
  Eventually("the restore is counted", [&] {
    return absl::StrContains(cluster.service(0).Metrics(), CheckpointsCounted("restored", 1));
  });
  EXPECT_GE(Value(cluster.service(0), "muond_buddy_recoveries_total{result=\"failed\""), 1);
  Story(run, 2, kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed(StorySpec()));
  // And the buddies hold what came after.
  DieAndComeBack(cluster, 1);
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  EXPECT_EQ(run.session().next_step(), kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed(StorySpec()));
}

TEST_F(TwoDeaths, ThatAreNoNeighboursAreBothBroughtBack) {
  Cluster cluster(4, WithBuddies(4));
  TestRun run(To(cluster, 1), StorySpec(), {.call_timeout = absl::Seconds(20)});
  Story(run, 0, 4);
  for (const int victim : {0, 2}) cluster.Stop(victim);
  for (const int victim : {0, 2}) cluster.Start(victim);
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  EXPECT_EQ(run.session().next_step(), 4);
  Story(run, 4, kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed(StorySpec()));
}

// Engines were added to those that had grown; who comes back has one for all its parameters.
TEST(Buddies, AddedParametersComeBackToo) {
  const ParameterAddition addition{
      .groups = {}, .parameters = {Matrix("aa", 24, 16), Vector("table", 700'000)}, .slices = {}};
  for (const int count : {1, 2}) {
    const TestDevices devices(count);
    Cluster cluster(3, WithBuddies(4));
    TestRun run(To(cluster, 0), StorySpec(), {.call_timeout = absl::Seconds(20)});
    auto service = StartService();
    TestRun calm(*service, StorySpec());
    for (TestRun* both : {&run, &calm}) {
      Story(*both, 0, 3);
      both->Add(addition);
      Story(*both, 3, 5);
    }
    for (int victim = 0; victim < 3; ++victim) {
      DieAndComeBack(cluster, victim);
      Must(run.session().AwaitRestore(absl::Seconds(60)));
      ASSERT_EQ(run.session().next_step(), 5 + victim) << "daemon " << victim;
      for (TestRun* both : {&run, &calm}) StoryStep(*both, 5 + victim);
    }
    EXPECT_EQ(run.TensorDigest(), calm.TensorDigest());
  }
}

// Once their values are there the whole state goes to the buddies, before any step.
TEST(Buddies, AddedParametersComeBackBeforeTheirFirstStep) {
  Cluster cluster(2, WithBuddies(4));
  TestRun run(To(cluster, 0), StorySpec(), {.call_timeout = absl::Seconds(20)});
  Story(run, 0, 3);
  const std::string sent = "muond_buddy_sent_bytes_total{";
  const double before = Value(cluster.service(1), sent);
  run.Add({.groups = {}, .parameters = {Vector("late", 1000)}, .slices = {}});
  const std::string digest = run.TensorDigest();
  double state = 0;
  for (const char* kind : {"master", "momentum", "second_moment"}) {
    state += Value(cluster.service(1), absl::StrFormat("muond_memory_bytes{kind=\"%s\"", kind));
  }
  Eventually("the buddy has it", [&] {
    return Value(cluster.service(1), sent) - before >= state;
  });
  DieAndComeBack(cluster, 1);
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  EXPECT_EQ(run.session().next_step(), 3);
  EXPECT_EQ(run.TensorDigest(), digest);
  StoryStep(run, 3);
}

// The copy of that commit lacks what is added at its end: the buddy must not take it for the whole.
TEST(Buddies, ParametersAddedWhileAStepIsCommittedComeBackToo) {
  ServiceOptions options = WithBuddies(8);  // a copy every four steps
  options.fault_points = "delay_commit:3:1";
  Cluster cluster(2, options);
  TestRun run(To(cluster, 0), StorySpec(), {.call_timeout = absl::Seconds(20)});
  const auto step = [&](int number) {
    return run.TryStep({.gradients = {{NoiseFor(run.spec(), number)}}})[0];
  };
  for (int number = 0; number < 3; ++number) Must(step(number));
  const ParameterAddition addition{.groups = {},
                                   .parameters = {Matrix("late", 24, 16)},
                                   .slices = {{"late", {WholeBox({24, 16})}}}};
  const auto other = Must(client::Session::Open(run.spec(), 0, run.slices(0),
                                                {.channel = To(cluster, 1), .transport = "grpc"}));
  std::thread stepping([&] { step(3).IgnoreError(); });
  Eventually("both commit", [&] {
    return cluster.service(0).FaultsFired("delay_commit") > 0 &&
           cluster.service(1).FaultsFired("delay_commit") > 0;
  });
  const absl::Status added = other->AddParameters(addition);
  stepping.join();
  ASSERT_TRUE(added.ok()) << added;
  run.Add({.groups = {}, .parameters = addition.parameters, .slices = {}});
  for (int victim = 0; victim < 2; ++victim) {
    Must(step(4 + victim));
    const std::string digest = run.TensorDigest();
    DieAndComeBack(cluster, victim);
    const absl::Status back = run.session().AwaitRestore(absl::Seconds(30));
    ASSERT_TRUE(back.ok()) << back;
    EXPECT_EQ(run.session().next_step(), 5 + victim);
    EXPECT_EQ(run.TensorDigest(), digest) << "daemon " << victim;
  }
}

// What is to be saved every so many steps needs a directory, and so does a restore.
TEST(Buddies, WithoutADirectoryNothingIsSavedAndNothingRestored) {
  ServiceOptions options = WithBuddies(1);
  options.checkpoint_every_steps = 1;
  options.checkpoint_every = absl::Milliseconds(1);
  Cluster cluster(2, options);
  TestRun run(To(cluster, 0), StorySpec(), {.call_timeout = absl::Seconds(20)});
  Story(run, 0, 3);
  const auto stub = v1::Checkpoint::NewStub(To(cluster, 0));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  v1::RestoreRequest request;
  request.set_run("run");
  request.set_name("ckpt-1");
  request.set_if_generation(run.session().generation());
  v1::RestoreReply reply;
  EXPECT_FALSE(stub->Restore(&context, request, &reply).ok());
  DieAndComeBack(cluster, 1);
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  Story(run, 3, kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed(StorySpec()));
}

// An operator's restore makes other state of it: what was held has no meaning any more.
TEST(Buddies, AfterARestoreByCallTheyHoldTheRestoredState) {
  CheckpointDirectory directory;
  ServiceOptions options = WithBuddies(2);
  options.checkpoint_dir = directory.path();
  Cluster cluster(2, options);
  TestRun run(To(cluster, 0), StorySpec(), {.call_timeout = absl::Seconds(20)});
  Story(run, 0, 2);
  Must(run.admin().SaveCheckpoint("run"));
  Story(run, 2, 5);
  Must(run.admin().RestoreCheckpoint("run", "ckpt-2"));
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  ASSERT_EQ(run.session().next_step(), 2);
  Story(run, 2, 3);
  DieAndComeBack(cluster, 0);
  Must(run.session().AwaitRestore(absl::Seconds(60)));
  ASSERT_EQ(run.session().next_step(), 3);
  Story(run, 3, kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed(StorySpec()));
}

}  // namespace
}  // namespace muond::cluster
