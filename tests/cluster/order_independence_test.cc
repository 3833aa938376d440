// The same run in any cut, chunk size and order of arrival, over one, two or three ranks and with
// any number of threads, ends in the same bytes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/support/raw_trainer.h"
#include "tests/support/service_fixture.h"

namespace muond::cluster {
namespace {

constexpr int kSteps = 10;
constexpr int kSkippedStep = 4;

struct Way {
  const char* name;
  Cut cut;
  std::int64_t world_size;
  std::int64_t chunk_bytes;
  int streams = 1;  // at once, per rank
  int threads = 1;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

RunSpec SpecFor(std::int64_t world_size) {
  ParameterSpec qkv = Matrix("qkv", 12, 8);
  qkv.split = {.sizes = {2, 1, 1}, .groups = 3, .interleaved = true};
  ParameterSpec experts = Matrix("experts", 1, 1);
  experts.shape = Dims{3, 5, 7};
  experts.kind = Kind::kExperts;
  RunSpec spec = SpecOf({Vector("norm", 33), qkv, Matrix("up", 24, 10), experts,
                         Matrix("down", 9, 21), Vector("bias", 17)},
                        world_size);
  spec.max_grad_norm = 1;
  return spec;
}

// The chunks of a step in a random order that keeps those of one slice ascending, dealt to streams
// by slice.
std::vector<std::vector<v1::Chunk>> Shuffled(const TestRun& run, std::int64_t rank,
                                             const Tensors& gradients, const Way& way,
                                             std::mt19937_64& random) {
  std::vector<std::vector<std::vector<v1::Chunk>>> slices(way.streams);
  for (const auto& [name, boxes] : run.slices(rank)) {
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const std::string bytes =
          BoxBytes(boxes[i], *run.parameter(name).shape, gradients.at(name), Dtype::kF32);
      std::vector<v1::Chunk> chunks = ChunksOf(name, i, bytes, way.chunk_bytes);
      std::reverse(chunks.begin(), chunks.end());
      slices[random() % way.streams].push_back(std::move(chunks));
    }
  }
  std::vector<std::vector<v1::Chunk>> streams(way.streams);
  for (int stream = 0; stream < way.streams; ++stream) {
    auto& open = slices[stream];
    while (!open.empty()) {
      auto& chosen = open[random() % open.size()];
      streams[stream].push_back(std::move(chosen.back()));
      chosen.pop_back();
      if (chosen.empty()) {
        std::swap(chosen, open.back());
        open.pop_back();
      }
    }
  }
  return streams;
}

v1::StepOutcome StepOf(Service& service, const TestRun& run, std::int64_t rank, std::int64_t step,
                       const Tensors& gradients, const Way& way) {
  std::mt19937_64 random(step * 100 + rank * 7 + way.chunk_bytes);
  RawTrainer trainer(service, "run", rank);
  Must(trainer.Begin(step));
  std::vector<std::thread> pushing;
  for (auto& chunks : Shuffled(run, rank, gradients, way, random)) {
    if (chunks.empty()) continue;
    pushing.emplace_back([&service, rank, step, chunks = std::move(chunks)] {
      RawTrainer stream(service, "run", rank);
      Must(stream.Push(step, chunks));
    });
  }
  for (std::thread& thread : pushing) thread.join();
  return Must(trainer.Finish(step));
}

// The digest after ten steps, the fifth of which overflows.
std::string DigestOf(const Way& way) {
  const auto service = StartService({.threads = way.threads});
  const RunSpec spec = SpecFor(way.world_size);
  TestRun run(*service, spec, {.cut = way.cut});
  for (int step = 0; step < kSteps; ++step) {
    Tensors gradients = NoiseFor(spec, 50 + step);
    if (step == kSkippedStep) gradients.at("up")[111] = std::numeric_limits<float>::quiet_NaN();
    std::vector<v1::StepOutcome> outcomes(way.world_size);
    std::vector<std::thread> ranks;
    for (std::int64_t rank = 0; rank < way.world_size; ++rank) {
      ranks.emplace_back(
          [&, rank] { outcomes[rank] = StepOf(*service, run, rank, step, gradients, way); });
    }
    for (std::thread& thread : ranks) thread.join();
    for (const v1::StepOutcome& outcome : outcomes) {
      EXPECT_EQ(outcome.applied(), step != kSkippedStep);
      EXPECT_EQ(outcome.SerializeAsString(), outcomes[0].SerializeAsString());
    }
  }
  EXPECT_EQ(run.Status().newton_schulz_calls(), (kSteps - 1) * (3 + 1 + 3 + 1));
  return run.TensorDigest();
}

class OrderIndependence : public ::testing::TestWithParam<Way> {
 protected:
  // Computed once; every way is another process under ctest.
  static const std::string& Plain() {
    static const std::string digest = DigestOf({"Plain", {}, 1, 1 << 20});
    return digest;
  }
};

TEST_P(OrderIndependence, TheSameBytesAfterTenSteps) { EXPECT_EQ(DigestOf(GetParam()), Plain()); }

INSTANTIATE_TEST_SUITE_P(Ways, OrderIndependence,
                         ::testing::Values(Way{"Chunk4Bytes", {}, 1, 4},
                                           Way{"Chunk100Bytes", {}, 1, 100},
                                           Way{"Chunk1000Bytes", {Cut::kRows, 2}, 1, 1000},
                                           Way{"Streams", {Cut::kFlat, 5}, 1, 64, 4},
                                           Way{"TwoThreads", {}, 1, 1 << 20, 1, 2},
                                           Way{"TwoRanksWhole", {}, 2, 100},
                                           Way{"TwoRanksFlat", {Cut::kFlat}, 2, 1 << 20},
                                           Way{"TwoRanksRows", {Cut::kRows}, 2, 4, 2},
                                           Way{"TwoRanksCols", {Cut::kCols, 2}, 2, 100},
                                           Way{"ThreeRanksWhole", {}, 3, 1 << 20},
                                           Way{"ThreeRanksFlat", {Cut::kFlat, 3}, 3, 100, 3},
                                           Way{"ThreeRanksRows", {Cut::kRows}, 3, 64},
                                           Way{"ThreeRanksCols", {Cut::kCols}, 3, 4, 2, 2}),
                         [](const auto& info) { return std::string(info.param.name); });

// Something else would be seen: one bit of one gradient changes the digest.
TEST(OrderIndependenceControl, AnotherGradientIsAnotherDigest) {
  const auto service = StartService();
  const RunSpec spec = SpecFor(1);
  std::string first;
  for (const char* name : {"one", "two"}) {
    RunSpec named = spec;
    named.name = name;
    TestRun run(*service, named);
    Tensors gradients = NoiseFor(spec, 1);
    if (first.empty()) {
      run.Step(gradients);
      first = run.TensorDigest();
      continue;
    }
    gradients.at("bias")[16] = std::nextafter(gradients.at("bias")[16], 2.0f);
    run.Step(gradients);
    EXPECT_NE(run.TensorDigest(), first);
  }
}

// Whoever comes first: 1e8 - 1e8 + 1 is 1 in this order only, and 0 in fp32 in the reverse one.
constexpr float kInOrder[] = {1e8f, -1e8f, 1};

TEST(OrderIndependenceControl, ReplicasAreSummedInRankOrder) {
  std::string expected;
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    const auto service = StartService();
    ParameterSpec p = Vector("p", 1);
    p.replicated = true;
    RunSpec spec = SpecOf({p}, 3);
    spec.reduce_ranks = Reduction::kSum;
    TestRun run(*service, spec);
    for (const int rank : order) {
      RawTrainer trainer(*service, "run", rank);
      Must(trainer.Begin(0));
      Must(trainer.Push(0, {ChunkOf("p", 0, 0, Bytes({kInOrder[rank]}))}));
      if (rank != order.back()) {
        EXPECT_FALSE(trainer.Finish(0, {}, 1).ok());
      } else {
        EXPECT_EQ(Must(trainer.Finish(0)).grad_norm(), 1);
      }
    }
    if (expected.empty()) expected = run.TensorDigest();
    EXPECT_EQ(run.TensorDigest(), expected);
  }
}

TEST(OrderIndependenceControl, MicroBatchesAreSummedInTheirOrder) {
  std::string expected;
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    const auto service = StartService();
    TestRun run(*service, SpecOf({Vector("p", 1)}));
    RawTrainer trainer(*service, "run");
    v1::BeginRequest begin = trainer.BeginRequestOf(0);
    begin.set_micro_batches(3);
    Must(trainer.Begin(begin));
    for (const int micro_batch : order) {
      v1::Chunk chunk = ChunkOf("p", 0, 0, Bytes({kInOrder[micro_batch]}));
      chunk.set_micro_batch(micro_batch);
      Must(trainer.Push(0, {chunk}));
    }
    EXPECT_EQ(Must(trainer.Finish(0)).grad_norm(), 1);
    if (expected.empty()) expected = run.TensorDigest();
    EXPECT_EQ(run.TensorDigest(), expected);
  }
}

// Big enough that products and passes are shared out to the threads.
TEST(OrderIndependenceControl, ThreadsChangeNoBit) {
  std::string expected;
  for (const int threads : {1, 2, 3}) {
    const auto service = StartService({.threads = threads});
    const RunSpec spec =
        SpecOf({Matrix("a", 192, 320), Matrix("b", 300, 130), Vector("p", 70'000)});
    TestRun run(*service, spec);
    for (std::uint64_t step = 0; step < 3; ++step) run.Step(NoiseFor(spec, step));
    if (expected.empty()) expected = run.TensorDigest();
    EXPECT_EQ(run.TensorDigest(), expected) << threads;
  }
}

// Over a socket with gRPC's own defaults, whose messages may have 4,194,304 bytes: tensors of that
// size and above go in chunks both ways.
TEST(OrderIndependenceControl, TensorFlowServing1382_BigTensorsNeedNoChannelArguments) {
  const auto service = StartService({.threads = 1, .listen = {"127.0.0.1:0"}});
  const auto channel =
      grpc::CreateChannel(service->addresses().at(0), grpc::InsecureChannelCredentials());
  for (const std::int64_t rows : {1024, 1025}) {
    ParameterSpec big = Matrix("big", rows, 1024);
    big.group = "adamw";
    RunSpec spec = SpecOf({big});
    spec.name = "rows-" + std::to_string(rows);
    auto session = Must(client::Session::Open(spec, 0, CutOf(spec, {}, 0), {.channel = channel}));
    const std::int64_t elements = rows * 1024;
    const Floats values = Noise(elements, 1), gradient = Noise(elements, 2);
    EXPECT_TRUE(Must(session->Initialize(
        {{{.parameter = "big", .data = values.data(), .elements = elements}}})));
    EXPECT_TRUE(
        Must(session->Step({.loss_scale = 0},
                           {{{.parameter = "big", .data = gradient.data(), .elements = elements}}}))
            .applied);
    Floats pulled(elements);
    Must(session->Pull(1, {{{.parameter = "big", .data = pulled.data(), .elements = elements}}}));
    for (std::int64_t i = 0; i < elements; ++i) {
      const double step = .1 * gradient[i] / (std::abs(gradient[i]) + 1e-8);  // AdamW's first
      ASSERT_NEAR(pulled[i], values[i] * .999 - step, 1e-5) << i;
    }
  }
}

}  // namespace
}  // namespace muond::cluster
