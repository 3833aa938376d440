// When checkpoints are saved, and what a restore by call does.
#include <thread>

#include "server/checkpoint/part.h"
#include "tests/cluster/checkpoint_story.h"

namespace muond::cluster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Checkpoints : public ::testing::TestWithParam<int> {
 protected:
  CheckpointDirectory directory_;
};
INSTANTIATE_TEST_SUITE_P(OfDaemons, Checkpoints, ::testing::Values(1, 3));

TEST_P(Checkpoints, EverySoManyStepsAndTheLastOnesStay) {
  ServiceOptions options = WithCheckpoints(directory_);
  options.checkpoint_every_steps = 2;
  options.checkpoint_keep = 2;
  Cluster cluster(GetParam(), options);
  TestRun run(cluster.channel(0), StorySpec());
  for (std::int64_t step = 0; step < 7; ++step) {
    StoryStep(run, step);
    if (step % 2 == 1) directory_.WaitFor("ckpt-" + std::to_string(step + 1), 2);
  }
  EXPECT_THAT(directory_.Names(), ElementsAre("ckpt-6", "ckpt-4"));
  const std::string metrics = cluster.service(0).Metrics();
  EXPECT_THAT(metrics, HasSubstr(CheckpointsCounted("saved", 3)));
  EXPECT_THAT(metrics, HasSubstr("muond_checkpoint_last_step{run=\"run\"} 6"));
}

TEST_P(Checkpoints, EverySoOften) {
  ServiceOptions options = WithCheckpoints(directory_);
  options.checkpoint_every = absl::Milliseconds(100);
  Cluster cluster(GetParam(), options);
  TestRun run(cluster.channel(0), StorySpec());
  Story(run, 0, 1);
  directory_.WaitFor("ckpt-1");
  Story(run, 1, 2);
  directory_.WaitFor("ckpt-2");
}

TEST_P(Checkpoints, TheSameVersionIsSavedOnce) {
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec());
  Story(run, 0, 2);
  client::Admin last(cluster.channel(GetParam() - 1), absl::Seconds(60));
  EXPECT_FALSE(Must(last.SaveCheckpoint("run")).known());
  const v1::SaveReply again = Must(run.admin().SaveCheckpoint("run"));
  EXPECT_TRUE(again.known());
  EXPECT_EQ(again.name(), "ckpt-2");
}

// Steps go on while they are saved: each holds one version, whole.
TEST_P(Checkpoints, OfARunThatTakesStepsMeanwhile) {
  ServiceOptions options = WithCheckpoints(directory_);
  options.checkpoint_keep = 100;
  Cluster cluster(GetParam(), options);
  TestRun run(cluster.channel(0), StorySpec());
  std::map<std::int64_t, Tensors> versions;
  std::atomic<bool> over = false;
  std::atomic<int> saves = 0;
  std::thread saver([&] {
    client::Admin admin(cluster.channel(0), absl::Seconds(60));
    for (; !over; ++saves) EXPECT_TRUE(admin.SaveCheckpoint("run").ok());
  });
  for (std::int64_t step = 0; step < 10 || saves < 4; ++step) {
    run.Step(NoiseFor(run.spec(), step));
    versions[step + 1] = run.Weights();
  }
  over = true;
  saver.join();
  auto files = Must(checkpoint::OpenFileSystem(directory_.path()));
  checkpoint::Store store(*files, "run");
  const auto names = directory_.Names();
  EXPECT_GT(names.size(), 2u);
  for (const std::string& name : names) {
    const auto manifest = Must(store.ReadManifest(name));
    if (manifest.control.step == 0) continue;
    Floats master(16 * 8);
    checkpoint::ShardSink sink{"a", 0, 16 * 8, {{"master", Dtype::kF32, master.data()}}};
    Must(checkpoint::ReadShards(*files, store.PathOf(name), manifest, {&sink, 1}));
    EXPECT_EQ(master, versions.at(manifest.control.step).at("a")) << name;
    Must(checkpoint::Verify(*files, store.PathOf(name), manifest));
  }
}

TEST_P(Checkpoints, TheEndOfADaemonWithGraceIsSaved) {
  std::string digest;
  {
    Cluster cluster(GetParam(), WithCheckpoints(directory_));
    TestRun run(cluster.channel(0), StorySpec());
    Story(run, 0, 3);
    digest = run.TensorDigest();
    std::vector<std::thread> stopping;
    for (int daemon = 0; daemon < GetParam(); ++daemon) {
      stopping.emplace_back([&, daemon] { cluster.service(daemon).Stop(absl::Seconds(30)); });
    }
    for (std::thread& thread : stopping) thread.join();
  }
  EXPECT_THAT(directory_.Names(), ElementsAre("ckpt-3"));
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec(), {.resume = true});
  EXPECT_EQ(run.session().next_step(), 3);
  EXPECT_EQ(run.TensorDigest(), digest);
}

TEST_P(Checkpoints, ARestoreByCallTakesEveryoneBack) {
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec());
  Story(run, 0, 3);
  const Tensors weights = run.Weights();
  Must(run.admin().SaveCheckpoint("run"));
  Story(run, 3, 6);
  const std::string digest = run.TensorDigest();
  const v1::RestoreReply reply = Must(run.admin().RestoreCheckpoint("run"));
  EXPECT_EQ(reply.name(), "ckpt-3");
  EXPECT_EQ(reply.position().next_step(), 3);
  // A trainer that is ahead is told where to go on, and takes no step of another number.
  const auto ahead = run.TryStep({.gradients = {{NoiseFor(run.spec(), 6)}}, .begin = {.step = 6}});
  EXPECT_TRUE(absl::IsAborted(ahead[0].status())) << ahead[0].status();
  EXPECT_THAT(ahead[0].status().ToString(), HasSubstr("pull version 3"));
  EXPECT_EQ(run.session().next_step(), 3);
  EXPECT_EQ(run.Weights(), weights);
  Story(run, 3, 6);
  EXPECT_EQ(run.TensorDigest(), digest);
  // What is saved now is the newest, though there was a step 6 before.
  Must(run.admin().SaveCheckpoint("run"));
  EXPECT_EQ(directory_.Names().front(), "ckpt-6");
}

TEST_P(Checkpoints, InitialValuesAreRefusedAfterARestore) {
  Cluster cluster(GetParam(), WithCheckpoints(directory_));
  TestRun run(cluster.channel(0), StorySpec());
  Story(run, 0, 1);
  Must(run.admin().SaveCheckpoint("run"));
  Must(run.admin().RestoreCheckpoint("run", "ckpt-1"));
  Must(run.session().Rejoin());
  const Floats values(15, 1.0f);
  const client::SliceSource source{"b", 0, values.data(), 15};
  const auto sent = run.session().Initialize({&source, 1});
  EXPECT_TRUE(absl::IsFailedPrecondition(sent.status())) << sent.status();
  EXPECT_THAT(sent.status().ToString(), HasSubstr("was restored from a checkpoint"));
}

TEST(CheckpointSettings, WithoutADirectoryTheCallSaysWhatIsMissing) {
  auto service = StartService();
  TestRun run(*service, StorySpec());
  const auto saved = run.admin().SaveCheckpoint("run");
  EXPECT_TRUE(absl::IsFailedPrecondition(saved.status()));
  EXPECT_THAT(saved.status().ToString(), HasSubstr("--checkpoint-dir"));
}

TEST(CheckpointSettings, NoneStartsAnewAndAStepIsThatStep) {
  CheckpointDirectory directory;
  {
    auto service = StartService(WithCheckpoints(directory));
    TestRun run(*service, StorySpec());
    Story(run, 0, 2);
    Must(run.admin().SaveCheckpoint("run"));
    Story(run, 2, 4);
    Must(run.admin().SaveCheckpoint("run"));
  }
  ServiceOptions options = WithCheckpoints(directory);
  options.restore = "2";
  {
    auto service = StartService(options);
    TestRun run(*service, StorySpec(), {.resume = true});
    EXPECT_EQ(run.session().next_step(), 2);
  }
  options.restore = "none";
  auto service = StartService(options);
  TestRun run(*service, StorySpec());
  EXPECT_EQ(run.session().next_step(), 0);
  options.restore = "yesterday";
  EXPECT_TRUE(absl::IsInvalidArgument(Service::Start(options).status()));
  options.restore = "latest";
  options.checkpoint_dir = "/nonexistent/muond";
  EXPECT_TRUE(absl::IsNotFound(Service::Start(options).status()));
}

}  // namespace
}  // namespace muond::cluster
