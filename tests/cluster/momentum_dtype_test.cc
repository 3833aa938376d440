// Muon's momentum kept in bf16: the same bits on any number of daemons, with overlap and without,
// through checkpoints and buddies; and never anything else than what the group says.
#include "grpcpp/grpcpp.h"
#include "tests/cluster/checkpoint_story.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kSaved = 5, kEnd = 8;

RunSpec Spec(Dtype momentum = Dtype::kBF16) {
  RunSpec spec = StorySpec();
  GroupOf(spec, "muon").momentum_dtype = momentum;
  return spec;
}

struct Ending {
  std::string digest;
  std::int64_t state_bytes = 0;
};

Ending EndOf(Service& service, const RunSpec& spec) {
  TestRun run(service, spec);
  Story(run, 0, kEnd);
  return {run.TensorDigest(), run.Status().state_bytes()};
}

const Ending& Undisturbed() {
  static const Ending& ending = *new Ending(EndOf(*StartService(), Spec()));
  return ending;
}

// Two bytes less for each of the 16 x 8 + 5 x 3 + 8 x 8 elements, and other bits for it.
TEST(MomentumInBf16, IsAnotherStateOfLessBytes) {
  const Ending wide = EndOf(*StartService(), Spec(Dtype::kF32));
  EXPECT_EQ(Undisturbed().state_bytes, wide.state_bytes - 2 * (16 * 8 + 5 * 3 + 8 * 8));
  EXPECT_NE(Undisturbed().digest, wide.digest);
}

TEST(MomentumInBf16, EndsInTheSameBytesOnAnyNumberOfDaemonsWithOverlapOrWithout) {
  for (const int daemons : {1, 2, 3, 5}) {
    for (const bool overlap : {false, true}) {
      Cluster cluster(daemons, {.threads = 1, .overlap = overlap});
      TestRun run(cluster.channel(daemons - 1), Spec());
      Story(run, 0, kEnd);
      EXPECT_EQ(run.TensorDigest(), Undisturbed().digest) << daemons << " daemons, " << overlap;
    }
  }
}

TEST(MomentumInBf16, ASkippedStepChangesNoByte) {
  auto service = StartService();
  TestRun run(*service, Spec());
  Story(run, 0, 2);
  const std::string before = run.TensorDigest();
  EXPECT_FALSE(StoryStep(run, 2).applied);
  EXPECT_EQ(run.TensorDigest(), before);
}

// DeepSpeed #7746, torchtitan PR #4615: state became fp32 on load; the step raised, memory grew.
TEST(MomentumInBf16, Torchtitan4615_ComesBackAsItIsOnAnotherNumberOfDaemons) {
  CheckpointDirectory directory;
  {
    Cluster cluster(2, WithCheckpoints(directory));
    TestRun run(cluster.channel(0), Spec());
    Story(run, 0, kSaved);
    Must(run.admin().SaveCheckpoint("run"));
  }
  Cluster cluster(3, WithCheckpoints(directory));
  TestRun run(cluster.channel(1), Spec(), {.resume = true});
  ASSERT_EQ(run.session().next_step(), kSaved);
  Story(run, kSaved, kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed().digest);
  std::int64_t bytes = 0;
  for (int daemon = 0; daemon < 3; ++daemon) {
    client::Admin admin(cluster.channel(daemon), absl::Seconds(30));
    bytes += Must(admin.Status("run")).runs(0).state_bytes();
  }
  EXPECT_EQ(bytes, Undisturbed().state_bytes);
}

TEST(MomentumInBf16, IsNeitherWidenedNorNarrowedOnItsWayIn) {
  for (const Dtype saved : {Dtype::kF32, Dtype::kBF16}) {
    CheckpointDirectory directory;
    {
      auto service = StartService(WithCheckpoints(directory));
      TestRun run(*service, Spec(saved));
      Story(run, 0, 2);
      Must(run.admin().SaveCheckpoint("run"));
    }
    ServiceOptions options = WithCheckpoints(directory);
    options.restore = "none";
    auto service = StartService(options);
    TestRun run(*service, Spec(saved == Dtype::kF32 ? Dtype::kBF16 : Dtype::kF32));
    const std::string before = run.TensorDigest();
    const auto restored = run.admin().RestoreCheckpoint("run", "ckpt-2");
    EXPECT_TRUE(absl::IsFailedPrecondition(restored.status())) << restored.status();
    EXPECT_THAT(restored.status().ToString(),
                HasSubstr("\"a\": restore: state tensors: the checkpoint has master f32, "));
    EXPECT_EQ(run.TensorDigest(), before);
    EXPECT_TRUE(StoryStep(run, 0).applied);
  }
}

TEST(MomentumInBf16, ComesBackFromABuddy) {
  ServiceOptions options{.threads = 1, .peer_patience = absl::Milliseconds(500)};
  options.buddy_steps = 2;
  Cluster cluster(3, options);
  // A channel by its address: the daemon may die.
  TestRun run(grpc::CreateChannel(cluster.endpoint(0), grpc::InsecureChannelCredentials()), Spec(),
              {.call_timeout = absl::Seconds(20)});
  for (std::int64_t step = 0; step < kEnd; ++step) {
    StoryStep(run, step);
    const int victim = static_cast<int>(step % 3);
    cluster.Stop(victim);
    cluster.Start(victim);
    Must(run.session().AwaitRestore(absl::Seconds(60)));
    ASSERT_EQ(run.session().next_step(), step + 1);
  }
  EXPECT_EQ(run.TensorDigest(), Undisturbed().digest);
}

// On memory that the host can't look into.
TEST(MomentumInBf16, IsTheSameOnDevices) {
  setenv("MUOND_TEST_DEVICES", "2", 1);
  auto service = StartService();
  unsetenv("MUOND_TEST_DEVICES");
  EXPECT_EQ(EndOf(*service, Spec()).digest, Undisturbed().digest);
}

}  // namespace
}  // namespace muond::cluster
