// From any number of daemons to any other, bit for bit: skips, loss scale and every t included.
#include "absl/strings/str_format.h"
#include "tests/cluster/checkpoint_story.h"

namespace muond::cluster {
namespace {

constexpr std::int64_t kSaved = 5, kEnd = 8;

struct Undisturbed {
  std::string digest;
  std::vector<StepOutcome> outcomes;
};

// Of one daemon that is never interrupted.
const Undisturbed& Reference() {
  static const Undisturbed& reference = *[] {
    auto service = StartService();
    TestRun run(*service, StorySpec(true));
    auto* made = new Undisturbed;
    made->outcomes = Story(run, 0, kEnd);
    made->digest = run.TensorDigest();
    return made;
  }();
  return reference;
}

// DeepSpeed #2898, #3810, #6441; Megatron-DeepSpeed #439: another world size was refused.
class DeepSpeed2898 : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(DeepSpeed2898, ResumesOnAnyNumberOfDaemons) {
  const auto [before, after] = GetParam();
  CheckpointDirectory directory;
  {
    Cluster cluster(before, WithCheckpoints(directory));
    TestRun run(cluster.channel(0), StorySpec(true));
    Story(run, 0, kSaved);
    const v1::SaveReply saved = Must(run.admin().SaveCheckpoint("run"));
    EXPECT_EQ(saved.name(), "ckpt-5");
    EXPECT_EQ(saved.step(), kSaved);
  }
  Cluster cluster(after, WithCheckpoints(directory));
  TestRun run(cluster.channel(after - 1), StorySpec(true), {.resume = true});
  ASSERT_EQ(run.session().next_step(), kSaved);
  EXPECT_EQ(run.session().loss_scale(), Reference().outcomes[kSaved - 1].next_loss_scale);
  const std::vector<StepOutcome> outcomes = Story(run, kSaved, kEnd);
  for (std::int64_t step = kSaved; step < kEnd; ++step) {
    EXPECT_EQ(outcomes[step - kSaved], Reference().outcomes[step]) << step;
  }
  EXPECT_EQ(run.TensorDigest(), Reference().digest);
}
INSTANTIATE_TEST_SUITE_P(Daemons, DeepSpeed2898,
                         ::testing::Values(std::pair(1, 1), std::pair(1, 2), std::pair(2, 3),
                                           std::pair(3, 5), std::pair(5, 1), std::pair(3, 2)),
                         [](const auto& info) {
                           return absl::StrFormat("%dTo%d", info.param.first, info.param.second);
                         });

// On memory that the host can't look into.
TEST(CheckpointDevices, AreCopiedAndRestored) {
  setenv("MUOND_TEST_DEVICES", "2", 1);
  CheckpointDirectory directory;
  {
    auto service = StartService(WithCheckpoints(directory));
    TestRun run(*service, StorySpec(true));
    Story(run, 0, kSaved);
    Must(run.admin().SaveCheckpoint("run"));
  }
  auto service = StartService(WithCheckpoints(directory));
  TestRun run(*service, StorySpec(true), {.resume = true});
  unsetenv("MUOND_TEST_DEVICES");
  Story(run, kSaved, kEnd);
  EXPECT_EQ(run.TensorDigest(), Reference().digest);
}

// DeepSpeed #7746: a resumed step raised or began anew; torchtitan PR #4615: state grew on load.
TEST(DeepSpeed7746, WithHalfPrecisionGradientsTheResumedRunIsTheSame) {
  RunSpec spec = StorySpec();
  for (ParameterSpec& parameter : spec.parameters) parameter.dtype = Dtype::kBF16;
  CheckpointDirectory directory;
  std::string digest;
  std::int64_t bytes = 0;
  {
    auto service = StartService(WithCheckpoints(directory));
    TestRun run(*service, spec);
    Story(run, 0, 4);
    Must(run.admin().SaveCheckpoint("run"));
    bytes = run.Status().state_bytes();
    Story(run, 4, 6);
    digest = run.TensorDigest();
  }
  auto service = StartService(WithCheckpoints(directory));
  TestRun run(*service, spec, {.resume = true});
  EXPECT_EQ(run.Status().state_bytes(), bytes);
  Story(run, 4, 6);
  EXPECT_EQ(run.TensorDigest(), digest);
}

// The first of two ranks is told the loss scale before the second has come.
TEST(CheckpointRanks, AnotherNumberOfRanksGoesOnWithTheSameLossScale) {
  CheckpointDirectory directory;
  double scale = 0;
  {
    auto service = StartService(WithCheckpoints(directory));
    TestRun run(*service, StorySpec());
    scale = Story(run, 0, 6).back().next_loss_scale;
    Must(run.admin().SaveCheckpoint("run"));
  }
  ASSERT_NE(scale, 256);
  RunSpec spec = StorySpec();
  spec.world_size = 2;
  auto service = StartService(WithCheckpoints(directory));
  TestRun run(*service, spec, {.cut = {Cut::kFlat}, .resume = true});
  for (const std::int64_t rank : {0, 1}) {
    EXPECT_EQ(run.session(rank).loss_scale(), scale);
    EXPECT_EQ(run.session(rank).next_step(), 6);
  }
  EXPECT_TRUE(StoryStep(run, 6).applied);
}

}  // namespace
}  // namespace muond::cluster
