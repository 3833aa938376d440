// Damaged checkpoints, checkpoints of something else, disks that fail, daemons that die.
#include <fstream>

#include "tests/cluster/checkpoint_story.h"

namespace muond::cluster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CheckpointFailure : public ::testing::TestWithParam<int> {
 protected:
  // Saves after steps 2 and 4.
  void SaveTwice() {
    Cluster cluster(GetParam(), WithCheckpoints(directory_));
    TestRun run(cluster.channel(0), StorySpec());
    Story(run, 0, 2);
    digest2_ = run.TensorDigest();
    Must(run.admin().SaveCheckpoint("run"));
    Story(run, 2, 4);
    Must(run.admin().SaveCheckpoint("run"));
  }

  CheckpointDirectory directory_;
  std::string digest2_;
};
INSTANTIATE_TEST_SUITE_P(OfDaemons, CheckpointFailure, ::testing::Values(1, 3));

// Whose part it is does not matter: all go back to the one before together.
TEST_P(CheckpointFailure, TheOneBeforeIsTakenWhenTheNewestIsDamaged) {
  SaveTwice();
  directory_.Damage("run/ckpt-4/part-" + std::to_string(GetParam() - 1) + "-0.safetensors");
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec(), {.resume = true});
  EXPECT_EQ(run.session().next_step(), 2);
  EXPECT_EQ(run.TensorDigest(), digest2_);
  const std::string metrics = cluster.service(0).Metrics();
  EXPECT_THAT(metrics, HasSubstr(CheckpointsCounted("restore_failed", 1)));
  EXPECT_THAT(metrics, HasSubstr(CheckpointsCounted("restored", 1)));
}

TEST_P(CheckpointFailure, ADamagedManifestDoesNotCount) {
  SaveTwice();
  directory_.Damage("run/ckpt-4/manifest.json");
  EXPECT_THAT(directory_.Names(), ElementsAre("ckpt-2"));
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec(), {.resume = true});
  EXPECT_EQ(run.session().next_step(), 2);
}

// What was asked for by name is taken or nothing is: not a byte, not the generation.
TEST_P(CheckpointFailure, ARestoreByNameThatFailsChangesNothing) {
  SaveTwice();
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec(), {.resume = true});
  Story(run, 4, 6);
  const v1::DigestReply before = run.Digest();
  directory_.Damage("run/ckpt-2/part-0-0.safetensors");
  const auto damaged = run.admin().RestoreCheckpoint("run", "ckpt-2");
  EXPECT_FALSE(damaged.ok());
  EXPECT_THAT(damaged.status().ToString(), HasSubstr("ckpt-2"));
  EXPECT_TRUE(absl::IsNotFound(run.admin().RestoreCheckpoint("run", "ckpt-3").status()));
  for (const char* name : {"../run/ckpt-4", "ckpt-4/..", "/etc"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(run.admin().RestoreCheckpoint("run", name).status()));
  }
  EXPECT_EQ(run.Digest().tensor_digest(), before.tensor_digest());
  EXPECT_EQ(run.Digest().control_digest(), before.control_digest());
  EXPECT_TRUE(StoryStep(run, 6).applied);
}

// KempnerForge PR #115, AReaL PR #1468; Megatron PR #7117, torchtitan: another layout was loaded.
TEST_P(CheckpointFailure, KempnerForge115_AnotherLayoutIsRefusedByName) {
  SaveTwice();
  const auto refused = [&](RunSpec spec) {
    ServiceOptions options = WithCheckpoints(directory_);
    options.restore = "none";
    Cluster cluster(GetParam(), options);
    TestRun run(cluster.channel(0), std::move(spec));
    const std::string before = run.TensorDigest();
    const auto restored = run.admin().RestoreCheckpoint("run", "ckpt-4");
    EXPECT_TRUE(absl::IsFailedPrecondition(restored.status())) << restored.status();
    EXPECT_EQ(run.TensorDigest(), before);
    return restored.status().ToString();
  };
  RunSpec spec = StorySpec();
  spec.parameters.pop_back();
  EXPECT_THAT(refused(spec), HasSubstr("\"v\": restore: the checkpoint has it, the run does not"));
  spec = StorySpec();
  spec.parameters.push_back(Vector("w", 3));
  EXPECT_THAT(refused(spec), HasSubstr("\"w\": restore: the checkpoint lacks it"));
  spec = StorySpec();
  spec.parameters[0].split.sizes = {8, 4, 4};
  EXPECT_THAT(refused(spec), HasSubstr("\"a\": restore: matrices (kind and split)"));
}

// Bytes of another run under this one's name.
TEST_P(CheckpointFailure, AnotherRunsCheckpointIsRefused) {
  SaveTwice();
  std::filesystem::rename(directory_.path() + "/run", directory_.path() + "/other");
  RunSpec spec = StorySpec();
  spec.name = "other";
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), spec);  // there is none that counts: it begins anew
  const auto restored = run.admin().RestoreCheckpoint("other", "ckpt-4");
  EXPECT_THAT(restored.status().ToString(), HasSubstr("belongs to run \"run\""));
}

TEST_P(CheckpointFailure, ASaveThatFailsIsCountedAndStepsGoOn) {
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec());
  Story(run, 0, 2);
  std::ofstream(directory_.path() + "/run");  // a file where the run's directory is to be
  EXPECT_FALSE(run.admin().SaveCheckpoint("run").ok());
  EXPECT_THAT(cluster.service(0).Metrics(),
              HasSubstr(CheckpointsCounted("save_failed", 1)));
  Story(run, 2, 3);
  std::filesystem::remove(directory_.path() + "/run");
  EXPECT_EQ(Must(run.admin().SaveCheckpoint("run")).name(), "ckpt-3");
}

// Any daemon dies, comes back empty, and all go on from the newest checkpoint by themselves.
TEST(CheckpointDeath, ADaemonThatComesBackIsRestoredWithTheOthers) {
  std::string digest;
  {
    auto service = StartService();
    TestRun run(*service, StorySpec());
    Story(run, 0, 8);
    digest = run.TensorDigest();
  }
  CheckpointDirectory directory;
  ServiceOptions options = WithCheckpoints(directory);
  options.checkpoint_every_steps = 2;
  Cluster cluster(3, options);
  TestRun run(cluster.channel(1), StorySpec(), {.call_timeout = absl::Seconds(10)});
  std::int64_t done = 0;
  for (const int victim : {2, 0}) {
    Story(run, done, done + 3);
    directory.WaitFor("ckpt-" + std::to_string((done + 3) / 2 * 2));
    cluster.Stop(victim);
    cluster.Start(victim);
    Must(run.session().AwaitRestore(absl::Seconds(30)));
    done = run.session().next_step();
    EXPECT_EQ(done % 2, 0);
    EXPECT_GT(done, 0);
  }
  Story(run, done, 8);
  EXPECT_EQ(run.TensorDigest(), digest);
}

}  // namespace
}  // namespace muond::cluster
