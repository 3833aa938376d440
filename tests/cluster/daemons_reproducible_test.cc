// The same run on one, two, three or five daemons, over any ranks, cuts and chunks, with
// Newton-Schulz before the verdict or after it, and steps that are skipped among them, ends in the
// same bytes.
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/cluster_fixture.h"

namespace muond::cluster {
namespace {

constexpr int kSteps = 50;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Way {
  const char* name;
  int daemons;
  std::int64_t world_size;
  Cut cut;
  std::int64_t chunk_bytes;
  int threads = 1;
  bool overlap = false;
};

// A stack that is spread matrix by matrix, an embedding that is cut, and small odds and ends.
RunSpec SpecFor(std::int64_t world_size) {
  ParameterSpec experts = Matrix("experts", 1, 1);
  experts.shape = Dims{4, 256, 256};
  experts.kind = Kind::kExperts;
  ParameterSpec qkv = Matrix("qkv", 12, 8);
  qkv.split = {.sizes = {2, 1, 1}, .groups = 3, .interleaved = true};
  ParameterSpec embedding = Vector("embedding", 1);
  embedding.shape = Dims{1200, 1024};
  embedding.kind = Kind::kMatrix;
  embedding.role = Role::kEmbedding;
  RunSpec spec = SpecOf({embedding, Vector("norm", 33), qkv, Matrix("up", 24, 10), experts,
                         Matrix("down", 9, 21), Vector("bias", 17)},
                        world_size);
  spec.max_grad_norm = 1;
  return spec;
}

struct Ending {
  std::string digest;
  int skipped = 0;
  double norms = 0;  // a sum over all steps
  double loss_scale = 0;
  std::int64_t newton_schulz_calls = 0;
};

// Steps whose number is a multiple of 7 carry an infinity, in another tensor each time.
Ending Train(const Way& way) {
  Cluster cluster(way.daemons, {.threads = way.threads, .overlap = way.overlap});
  RunSpec spec = SpecFor(way.world_size);
  spec.loss_scale.mode = LossScaleMode::kDynamic;
  spec.loss_scale.policy = LossScalePolicy::kTorch;
  TestRun run(cluster.channel(way.daemons - 1), spec,
              {.cut = way.cut, .chunk_bytes = way.chunk_bytes});
  Ending ending;
  for (int step = 0; step < kSteps; ++step) {
    Tensors gradients = NoiseFor(run.spec(), 100 + step);
    if (step % 7 == 6) {
      Floats& spoiled = gradients.at(spec.parameters[step / 7 % spec.parameters.size()].name);
      spoiled[spoiled.size() - 1 - step % 5] = kInf;
    }
    const StepOutcome outcome = run.Step(gradients);
    ending.skipped += !outcome.applied;
    ending.norms += outcome.grad_norm;
    ending.newton_schulz_calls += outcome.newton_schulz_calls;
    ending.loss_scale = outcome.next_loss_scale;
  }
  ending.digest = run.TensorDigest();
  return ending;
}

TEST(Daemons, FiftyStepsEndInTheSameBytesOnAnyNumberOfThem) {
  const Way ways[] = {
      {"one daemon, one rank", 1, 1, {Cut::kWhole}, 1 << 20},
      {"two daemons, flat shards of two ranks", 2, 2, {Cut::kFlat}, 1 << 16},
      {"three daemons, rows of three ranks in small chunks", 3, 3, {Cut::kRows, 2}, 1 << 12, 2},
      {"five daemons, columns of two ranks", 5, 2, {Cut::kCols}, 1 << 18, 3},
      {"one daemon that overlaps, rows of two ranks", 1, 2, {Cut::kRows}, 1 << 12, 2, true},
      {"two daemons that overlap", 2, 1, {Cut::kWhole}, 1 << 20, 1, true},
      {"three daemons that overlap, flat shards of three ranks", 3, 3, {Cut::kFlat, 2}, 1 << 14, 3,
       true},
  };
  Ending first;
  for (const Way& way : ways) {
    SCOPED_TRACE(way.name);
    const Ending ending = Train(way);
    EXPECT_EQ(ending.skipped, 7);
    if (first.digest.empty()) first = ending;
    EXPECT_EQ(ending.digest, first.digest);
    EXPECT_EQ(ending.norms, first.norms);
    EXPECT_EQ(ending.loss_scale, first.loss_scale);
    EXPECT_EQ(ending.newton_schulz_calls, first.newton_schulz_calls);
  }
  // 4 experts, 3 blocks of qkv, up and down, in each of the 43 steps that were applied.
  EXPECT_EQ(first.newton_schulz_calls, 43 * 9);
}

}  // namespace
}  // namespace muond::cluster
