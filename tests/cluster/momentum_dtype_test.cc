// A group whose momentum is kept in bf16, through the whole service: the same bytes on any number
// of daemons and devices, saved, restored, resharded and brought back as bf16, and never taken for
// another dtype.
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "grpcpp/grpcpp.h"
#include "server/checkpoint/part.h"
#include "server/metrics/exposition_for_test.h"
#include "tests/cluster/checkpoint_story.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kSaved = 5, kEnd = 8;

RunSpec Halved(RunSpec spec) {
  GroupOf(spec, "muon").momentum_dtype = Dtype::kBF16;
  return spec;
}

// Of one daemon that is never interrupted.
const std::string& Undisturbed() {
  static const std::string& digest = *[] {
    auto service = StartService();
    TestRun run(*service, Halved(StorySpec(true)));
    Story(run, 0, kEnd);
    return new std::string(run.TensorDigest());
  }();
  return digest;
}

// One tensor of the newest checkpoint.
template <typename Value>
std::vector<Value> Saved(const CheckpointDirectory& directory, const std::string& parameter,
                         const std::string& tensor, Dtype dtype) {
  auto files = Must(checkpoint::OpenFileSystem(directory.path()));
  checkpoint::Store store(*files, "run");
  const std::string name = directory.Names().front();
  const auto manifest = Must(store.ReadManifest(name));
  for (const checkpoint::Parameter& one : manifest.parameters) {
    if (one.name != parameter) continue;
    std::vector<Value> values(Must(ElementCount(one.shape)));
    const checkpoint::ShardSink sink{
        parameter, 0, std::ssize(values), {{tensor, dtype, values.data()}}};
    Must(checkpoint::ReadShards(*files, store.PathOf(name), manifest, {&sink, 1}));
    return values;
  }
  return {};
}

// ---- What is computed --------------------------------------------------------------------------

struct Form {
  bool sum = false;
  bool clipped = false;
};
class MomentumInBf16OfForm : public ::testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(All, MomentumInBf16OfForm,
                         ::testing::Values(Form{}, Form{.sum = true}, Form{.clipped = true}),
                         [](const auto& info) {
                           return std::string(info.param.sum ? "Sum" : "Ema") +
                                  (info.param.clipped ? "Clipped" : "");
                         });

// docs/semantics.md by the letter: fp32's arithmetic on what is kept, rounded when it is kept.
TEST_P(MomentumInBf16OfForm, IsTheFormulaOnWhatIsKept) {
  CheckpointDirectory directory;
  RunSpec spec = Halved(SpecOf({Matrix("w", 7, 5)}));
  GroupSpec& group = GroupOf(spec, "muon");
  group.momentum_sum_form = GetParam().sum;
  if (GetParam().clipped) {
    spec.max_grad_norm = 0.7;
    spec.clip_policy = ClipPolicy::kAll;
  }
  auto service = StartService(WithCheckpoints(directory));
  TestRun run(*service, spec);
  std::vector<std::uint16_t> expected(35);
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Tensors gradients = NoiseFor(spec, 40 + step);
    const StepOutcome outcome = run.Step(gradients);
    ASSERT_TRUE(outcome.applied);
    EXPECT_EQ(outcome.clip_coefficient < 1, GetParam().clipped);
    const double beta = group.muon.momentum;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double g = gradients.at("w")[i] * outcome.clip_coefficient;
      const double m = kernels::BF16ToFloat(expected[i]);
      expected[i] = kernels::FloatToBF16(
          static_cast<float>(GetParam().sum ? beta * m + g : m + (1 - beta) * (g - m)));
    }
  }
  Must(run.admin().SaveCheckpoint("run"));
  EXPECT_EQ(Saved<std::uint16_t>(directory, "w", "momentum", Dtype::kBF16), expected);
  double squares = 0;
  for (const std::uint16_t bits : expected) squares += std::pow(kernels::BF16ToFloat(bits), 2);
  EXPECT_NEAR(run.Describe("w").momentum_norm(), std::sqrt(squares), 1e-9);
}

TEST(MomentumInBf16, IsTheSameOnAnyNumberOfDaemonsAndDevices) {
  struct Way {
    int daemons;
    bool overlap;
    const char* devices;
  };
  for (const Way& way : {Way{2, false, "1"}, Way{3, true, "1"}, Way{5, false, "1"},
                         Way{1, true, "2"}, Way{2, false, "2"}}) {
    SCOPED_TRACE(absl::StrFormat("%d daemons, overlap %d, %s devices", way.daemons, way.overlap,
                                 way.devices));
    if (way.devices[0] != '1') setenv("MUOND_TEST_DEVICES", way.devices, 1);
    {
      Cluster cluster(way.daemons, {.threads = 1, .overlap = way.overlap});
      TestRun run(cluster.channel(0), Halved(StorySpec(true)));
      Story(run, 0, kEnd);
      EXPECT_EQ(run.TensorDigest(), Undisturbed());
    }
    unsetenv("MUOND_TEST_DEVICES");
  }
  auto service = StartService();
  TestRun wide(*service, StorySpec(true));
  Story(wide, 0, kEnd);
  EXPECT_NE(wide.TensorDigest(), Undisturbed()) << "bf16 is not fp32";
}

TEST(MomentumInBf16, ASkipAndAnAbsenceChangeNoByte) {
  auto service = StartService();
  RunSpec spec = Halved(SpecOf({Matrix("a", 8, 6), Matrix("b", 8, 6)}));
  GroupOf(spec, "muon").momentum_sum_form = true;
  TestRun run(*service, spec);
  ASSERT_TRUE(run.Step(NoiseFor(spec, 1)).applied);
  auto before = run.Digest(true);
  Tensors gradients = NoiseFor(spec, 2);
  gradients["b"][0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(run.Step(gradients).cause, SkipCause::kOverflow);
  EXPECT_EQ(run.TensorDigest(), before.tensor_digest());
  // Finite in fp32, and the momentum would be; rounded to bf16 it would not.
  gradients = NoiseFor(spec, 3);
  gradients["a"][0] = 3.4e38f;
  EXPECT_EQ(run.Step(gradients).cause, SkipCause::kStateOverflow);
  EXPECT_EQ(run.TensorDigest(), before.tensor_digest());
  gradients = NoiseFor(spec, 4);
  gradients.erase("b");
  ASSERT_TRUE(run.Step(gradients).applied);
  auto after = run.Digest(true);
  EXPECT_EQ(after.parameters().at("b"), before.parameters().at("b"));
  EXPECT_NE(after.parameters().at("a"), before.parameters().at("a"));
}

TEST(MomentumInBf16, TakesHalfTheBytesAndIsCountedSo) {
  Cluster cluster(2);
  TestRun run(cluster.channel(0), Halved(StorySpec(true)));
  constexpr double kMuon = 16 * 8 + 5 * 3 + 8 * 8, kAdamW = 600'007;
  double state = 0;
  std::map<std::string, double> bytes;
  for (int daemon = 0; daemon < 2; ++daemon) {
    client::Admin admin(cluster.channel(daemon), absl::Seconds(10));
    state += static_cast<double>(Must(admin.Status("run")).runs(0).state_bytes());
    const auto samples = ParseExposition(cluster.service(daemon).Metrics());
    for (const char* kind : {"master", "momentum", "second_moment"}) {
      bytes[kind] +=
          samples.at(absl::StrFormat("muond_memory_bytes{kind=\"%s\",location=\"host\"}", kind));
    }
  }
  EXPECT_EQ(state, 6 * kMuon + 12 * kAdamW);
  EXPECT_EQ(bytes["master"], 4 * (kMuon + kAdamW));
  EXPECT_EQ(bytes["momentum"], 2 * kMuon + 4 * kAdamW);
  EXPECT_EQ(bytes["second_moment"], 4 * kAdamW);
}

// deepmd PR #5130, muon-clip #9, NorMuon PR #4: dtypes of gradient, parameter and momentum that did
// not fit together were found by the step. All of them register and run, or are refused before.
TEST(Deepmd5130, EveryCombinationOfDtypesRunsOrIsRefusedAtRegistration) {
  auto service = StartService();
  int runs = 0, refused = 0;
  for (const Dtype parameter : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    for (const Dtype momentum : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
      RunSpec spec = SpecOf({Matrix("w", 6, 4)});
      spec.name =
          absl::StrFormat("run-%d-%d", static_cast<int>(parameter), static_cast<int>(momentum));
      spec.parameters[0].dtype = parameter;
      GroupOf(spec, "muon").momentum_dtype = momentum;
      if (momentum == Dtype::kF16) {
        const auto session =
            client::Session::Open(spec, 0, CutOf(spec, {}, 0), {.channel = service->channel()});
        EXPECT_TRUE(absl::IsInvalidArgument(session.status())) << session.status();
        EXPECT_THAT(session.status().ToString(), HasSubstr("group \"muon\": momentum_dtype"));
        refused += 3;
        continue;
      }
      TestRun run(*service, spec);
      for (const Dtype gradient : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
        const StepOutcome outcome =
            run.Step({.gradients = {{NoiseFor(spec, 7)}}, .dtype = gradient});
        runs += outcome.applied && outcome.newton_schulz_calls == 1;
      }
    }
  }
  EXPECT_EQ(runs, 18);
  EXPECT_EQ(refused, 9);
}

TEST(MomentumInBf16, RanksMustAskForTheSame) {
  auto service = StartService();
  RunSpec spec = Halved(SpecOf({Matrix("w", 6, 4)}, 2));
  const auto first =
      client::Session::Open(spec, 0, CutOf(spec, {Cut::kFlat}, 0), {.channel = service->channel()});
  ASSERT_TRUE(first.ok()) << first.status();
  GroupOf(spec, "muon").momentum_dtype = Dtype::kF32;
  const auto second =
      client::Session::Open(spec, 1, CutOf(spec, {Cut::kFlat}, 1), {.channel = service->channel()});
  EXPECT_THAT(second.status().ToString(),
              HasSubstr("momentum_dtype: the run has bf16, this rank sent f32"));
}

// ---- What is kept ------------------------------------------------------------------------------

class ReshardInBf16 : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(ReshardInBf16, ContinuesBitForBit) {
  const auto [before, after] = GetParam();
  CheckpointDirectory directory;
  {
    Cluster cluster(before, WithCheckpoints(directory));
    TestRun run(cluster.channel(0), Halved(StorySpec(true)));
    Story(run, 0, kSaved);
    Must(run.admin().SaveCheckpoint("run"));
  }
  Cluster cluster(after, WithCheckpoints(directory));
  TestRun run(cluster.channel(after - 1), Halved(StorySpec(true)), {.resume = true});
  ASSERT_EQ(run.session().next_step(), kSaved);
  Story(run, kSaved, kEnd);
  EXPECT_EQ(run.TensorDigest(), Undisturbed());
}
INSTANTIATE_TEST_SUITE_P(Daemons, ReshardInBf16,
                         ::testing::Values(std::pair(1, 1), std::pair(1, 5), std::pair(2, 3),
                                           std::pair(5, 2)),
                         [](const auto& info) {
                           return absl::StrFormat("%dTo%d", info.param.first, info.param.second);
                         });

// DeepSpeed #7746: a bf16 momentum came back as another dtype, and the next step raised. torchtitan
// PR #4615: it came back as fp32, twice as large.
TEST(DeepSpeed7746, AMomentumInBf16ComesBackInBf16AndTheNextStepRuns) {
  RunSpec spec = Halved(StorySpec());
  for (ParameterSpec& parameter : spec.parameters) parameter.dtype = Dtype::kBF16;
  CheckpointDirectory directory;
  std::string saved, digest;
  std::int64_t bytes = 0;
  {
    auto service = StartService(WithCheckpoints(directory));
    TestRun run(*service, spec);
    Story(run, 0, 4);
    Must(run.admin().SaveCheckpoint("run"));
    bytes = run.Status().state_bytes();
    saved = run.TensorDigest();
    Story(run, 4, 6);
    digest = run.TensorDigest();
  }
  auto service = StartService(WithCheckpoints(directory));
  TestRun run(*service, spec, {.resume = true});
  EXPECT_EQ(run.Status().state_bytes(), bytes);
  EXPECT_EQ(run.TensorDigest(), saved);
  Story(run, 4, 6);
  EXPECT_EQ(run.TensorDigest(), digest);
}

// In either direction, and whatever else may be given up: nothing is widened or narrowed.
TEST(Torchtitan4615, AMomentumOfAnotherDtypeIsRefusedAndNothingChanges) {
  for (const bool saved_halved : {true, false}) {
    CheckpointDirectory directory;
    const RunSpec wide = StorySpec(), halved = Halved(StorySpec());
    {
      auto service = StartService(WithCheckpoints(directory));
      TestRun run(*service, saved_halved ? halved : wide);
      Story(run, 0, 2);
      Must(run.admin().SaveCheckpoint("run"));
    }
    ServiceOptions options = WithCheckpoints(directory);
    options.restore = "none";
    auto service = StartService(options);
    TestRun run(*service, saved_halved ? wide : halved);
    Story(run, 0, 1);
    const std::string digest = run.TensorDigest();
    for (const bool relayout : {false, true}) {
      const auto restored = run.admin().RestoreCheckpoint("run", "ckpt-2", relayout);
      EXPECT_TRUE(absl::IsFailedPrecondition(restored.status())) << restored.status();
      EXPECT_THAT(restored.status().ToString(),
                  HasSubstr(absl::StrFormat(
                      "state tensors: the checkpoint has master f32, momentum %s, the run has "
                      "master f32, momentum %s",
                      saved_halved ? "bf16" : "f32", saved_halved ? "f32" : "bf16")));
    }
    EXPECT_EQ(run.TensorDigest(), digest);
    EXPECT_TRUE(run.Step(NoiseFor(run.spec(), 9)).applied);
  }
}

TEST(MomentumInBf16, IsTakenIntoAnotherViewOfTheMatrix) {
  CheckpointDirectory directory;
  RunSpec spec = Halved(SpecOf({Matrix("w", 6, 4)}));
  std::vector<std::uint16_t> momentum;
  {
    auto service = StartService(WithCheckpoints(directory));
    TestRun run(*service, spec);
    ASSERT_TRUE(run.Step(NoiseFor(spec, 1)).applied);
    Must(run.admin().SaveCheckpoint("run"));
    momentum = Saved<std::uint16_t>(directory, "w", "momentum", Dtype::kBF16);
  }
  spec.parameters[0].split.sizes = {2, 2, 2};
  ServiceOptions options = WithCheckpoints(directory);
  options.restore = "none";
  auto service = StartService(options);
  TestRun run(*service, spec);
  ASSERT_TRUE(run.admin().RestoreCheckpoint("run", "ckpt-1").status().code() ==
              absl::StatusCode::kFailedPrecondition);
  Must(run.admin().RestoreCheckpoint("run", "ckpt-1", true));
  Must(run.session().Rejoin());
  Must(run.admin().SaveCheckpoint("run"));
  EXPECT_EQ(Saved<std::uint16_t>(directory, "w", "momentum", Dtype::kBF16), momentum);
  EXPECT_EQ(run.Step(NoiseFor(spec, 2)).newton_schulz_calls, 3);
}

TEST(MomentumInBf16, ComesBackFromABuddy) {
  ServiceOptions options{.threads = 1, .peer_patience = absl::Milliseconds(500)};
  options.buddy_steps = 2;
  Cluster cluster(3, options);
  const auto channel = grpc::CreateChannel(cluster.endpoint(0), grpc::InsecureChannelCredentials());
  TestRun run(channel, Halved(StorySpec(true)), {.call_timeout = absl::Seconds(20)});
  for (std::int64_t step = 0; step < kEnd; ++step) {
    StoryStep(run, step);
    if (step % 3 == 2) continue;
    const int victim = static_cast<int>((step + 1) % 3);
    cluster.Stop(victim);
    cluster.Start(victim);
    const absl::Status back = run.session().AwaitRestore(absl::Seconds(60));
    ASSERT_TRUE(back.ok()) << back;
    ASSERT_EQ(run.session().next_step(), step + 1) << "daemon " << victim;
  }
  EXPECT_EQ(run.TensorDigest(), Undisturbed());
}

// A run that keeps fp32 gets a group that keeps bf16: each keeps what it was told.
TEST(MomentumInBf16, OfAnAddedGroupIsItsOwn) {
  CheckpointDirectory directory;
  RunSpec spec = SpecOf({Matrix("a", 16, 8), Vector("v", 9)});
  GroupSpec group{.name = "halved", .algorithm = Algorithm::kMuon};
  group.momentum_dtype = Dtype::kBF16;
  ParameterSpec added = Matrix("b", 12, 8);
  added.group = "halved";
  std::string digest;
  {
    Cluster cluster(3, WithCheckpoints(directory));
    TestRun run(cluster.channel(0), spec);
    ASSERT_TRUE(run.Step(NoiseFor(spec, 1)).applied);
    auto before = run.Digest(true);
    run.Add({.groups = {group}, .parameters = {added}, .slices = {}});
    auto after = run.Digest(true);
    EXPECT_EQ(after.parameters().at("a"), before.parameters().at("a"));
    spec = run.spec();
    ASSERT_TRUE(run.Step(NoiseFor(spec, 2)).applied);
    Must(run.admin().SaveCheckpoint("run"));
    EXPECT_EQ(Saved<std::uint16_t>(directory, "b", "momentum", Dtype::kBF16).size(), 96U);
    EXPECT_EQ(Saved<float>(directory, "a", "momentum", Dtype::kF32).size(), 128U);
    ASSERT_TRUE(run.Step(NoiseFor(spec, 3)).applied);
    digest = run.TensorDigest();
  }
  Cluster cluster(2, WithCheckpoints(directory));
  TestRun run(cluster.channel(0), spec, {.resume = true});
  ASSERT_TRUE(run.Step(NoiseFor(spec, 3)).applied);
  EXPECT_EQ(run.TensorDigest(), digest);
}

}  // namespace
}  // namespace muond::cluster
