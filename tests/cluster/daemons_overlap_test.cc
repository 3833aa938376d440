// Newton-Schulz before the verdict: it starts when a matrix's gradient is complete, and a step that
// is skipped after all changes no byte. That the bits are those without it:
// daemons_reproducible_test.
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/cluster_fixture.h"
#include "tests/support/raw_trainer.h"

namespace muond::cluster {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

RunSpec Spec() { return SpecOf({Matrix("a", 16, 8), Matrix("b", 16, 8)}); }

class Overlap : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfDaemons, Overlap, ::testing::Values(1, 2));

// The injected fault hits the first Newton-Schulz of a daemon: that it does no harm to the second
// step shows that the first step's was run, and thrown away.
TEST_P(Overlap, AnOverflowThatIsFoundAfterwardsChangesNoByte) {
  Cluster cluster(GetParam(), {.threads = 1,
                               .overlap = true,
                               .fault_points = "newton_schulz_fast_path_nan:0:1"});
  TestRun run(cluster.channel(0), Spec(), {});
  EXPECT_EQ(run.Status().overlap(), "on");
  const std::string before = run.TensorDigest();
  Tensors gradients = NoiseFor(run.spec(), 1);
  client::Session& session = run.session();
  const auto push = [&](const std::string& name, const Floats& values) {
    const client::SliceSource source{
        .parameter = name, .data = values.data(), .elements = std::ssize(values)};
    Must(session.Push({&source, 1}));
  };
  Must(session.Begin({.step = 0, .loss_scale = 1}));
  push("a", gradients.at("a"));
  // Early work has its turn whenever a device has nothing else to do.
  Eventually("\"a\" is orthogonalized before the verdict", [&] {
    EXPECT_EQ(run.TensorDigest(), before) << "momentum is only read";
    std::int64_t fired = 0;
    for (int daemon = 0; daemon < cluster.count(); ++daemon) {
      fired += cluster.service(daemon).FaultsFired("newton_schulz_fast_path_nan");
    }
    return fired == 1;
  });
  EXPECT_EQ(run.TensorDigest(), before) << "momentum is only read";
  gradients.at("b").back() = kInf;
  push("b", gradients.at("b"));
  const StepOutcome skipped = Must(session.Finish());
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.cause, SkipCause::kOverflow);
  EXPECT_EQ(skipped.newton_schulz_calls, 0);
  EXPECT_EQ(run.TensorDigest(), before);

  const StepOutcome applied = run.Step(NoiseFor(run.spec(), 2));
  EXPECT_TRUE(applied.applied);
  EXPECT_EQ(applied.newton_schulz_calls, 2);
  // Of two daemons the one that owns "b" has orthogonalized nothing before.
  EXPECT_EQ(applied.newton_schulz_fallbacks, GetParam() - 1);
}

TEST(OverlapRules, OffWhereClippingNeedsTheNormFirst) {
  auto service = StartService({.threads = 1, .overlap = true});
  RunSpec spec = Spec();
  spec.max_grad_norm = 0.5;
  spec.clip_policy = ClipPolicy::kAll;
  TestRun all(*service, spec);
  EXPECT_THAT(all.Status().overlap(), HasSubstr("clip policy \"all\""));
  EXPECT_LT(all.Step(NoiseFor(spec, 1)).clip_coefficient, 1);
  spec.name = "adamw-only";
  spec.clip_policy = ClipPolicy::kAdamWOnly;
  TestRun half(*service, spec);
  EXPECT_EQ(half.Status().overlap(), "on");
}

TEST(OverlapRules, ItsScratchIsWorkspaceOfTheDaemon) {
  const RunSpec spec = SpecOf({Matrix("a", 64, 64), Matrix("b", 64, 64)});
  std::string workspace[2];
  for (const bool overlap : {false, true}) {
    auto service = StartService({.threads = 1, .overlap = overlap});
    TestRun run(*service, spec);
    const std::string metrics = service->Metrics();
    const std::size_t at = metrics.find("muond_memory_bytes{kind=\"workspace\"");
    ASSERT_NE(at, std::string::npos);
    workspace[overlap] = metrics.substr(at, metrics.find('\n', at) - at);
  }
  // Both fit into one batch: O has its own place instead of one in the scratch.
  EXPECT_EQ(workspace[0], workspace[1]);
}

}  // namespace
}  // namespace muond::cluster
