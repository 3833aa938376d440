// Batches on every backend: what a tensor gets does not depend on what else is in the call.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCases;
using testing::BackendTest;
using testing::Buffer;
using testing::Bytes;
using testing::CaseName;
using testing::Check;
using testing::Gaussian;
using testing::IterateBuffer;
using testing::Orthogonalize;
using testing::SameBits;
using testing::SameScan;

// Small and large tensors, one of several blocks, two without elements.
constexpr std::size_t kSizes[] = {3, 0, 1, kBlockElements + 5, 700, kBlockElements, 0, 17};
constexpr std::size_t kTensors = std::size(kSizes);

class Batch : public BackendTest {
 protected:
  // A buffer for every size: Gaussian numbers of other seeds, or zeros.
  std::vector<std::unique_ptr<Buffer>> Make(unsigned seed) {
    std::vector<std::unique_ptr<Buffer>> buffers;
    for (const std::size_t size : kSizes) {
      buffers.push_back(std::make_unique<Buffer>(
          *backend_, seed == 0 ? std::vector<float>(size) : Gaussian(size, ++seed * 31)));
    }
    return buffers;
  }
  std::vector<std::unique_ptr<IterateBuffer>> MakeIterates() {
    std::vector<std::unique_ptr<IterateBuffer>> buffers;
    for (const std::size_t size : kSizes) {
      buffers.push_back(std::make_unique<IterateBuffer>(*backend_, size));
    }
    return buffers;
  }
  static GradientView View(const Buffer& data, float unscale) {
    return {data.get(), Dtype::kF32, data.size(), unscale};
  }
};
MUOND_FOR_EVERY_BACKEND(Batch);

TEST_P(Batch, MatrixGetsTheSameBitsAloneAndInAnyBatch) {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes;
  for (int i = 0; i < 3; ++i) shapes.insert(shapes.end(), {{5, 3}, {64, 64}, {30, 70}, {70, 30}});
  std::vector<std::unique_ptr<IterateBuffer>> inputs, outputs;
  std::vector<MatrixJob> jobs;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto& [rows, cols] = shapes[i];
    const auto count = static_cast<std::size_t>(rows * cols);
    inputs.push_back(
        std::make_unique<IterateBuffer>(*backend_, Gaussian(count, static_cast<unsigned>(i))));
    outputs.push_back(std::make_unique<IterateBuffer>(*backend_, count));
    jobs.push_back({.u = inputs[i]->get(),
                    .o = outputs[i]->get(),
                    .rows = rows,
                    .cols = cols,
                    .u_scale = inputs[i]->scale()});
  }
  std::vector<NewtonSchulzResult> results(jobs.size());
  Check(backend_->NewtonSchulz(jobs, testing::SimpleRule(), results));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const auto alone = Orthogonalize(*backend_, inputs[i]->Read(), jobs[i].rows, jobs[i].cols);
    EXPECT_TRUE(SameBits(outputs[i]->Read(), alone.o)) << "job " << i;
    EXPECT_EQ(results[i].output_norm, alone.result.output_norm);
  }
}

TEST_P(Batch, NothingIsABatch) {
  Check(backend_->Copy({}));
  Check(backend_->Scan({}, {}));
  Check(backend_->ScanState({}, {}));
  Check(backend_->Momentum({}, {}));
  Check(backend_->NewtonSchulz({}, testing::SimpleRule(), {}));
  Check(backend_->Apply({}, {}));
  Check(backend_->AdamW({}, {}));
}

TEST_P(Batch, ScansOfManyTensorsAreThoseOfEach) {
  const auto data = Make(1);
  std::vector<GradientView> gradients;
  std::vector<StateView> tensors;
  for (std::size_t i = 0; i < kTensors; ++i) {
    gradients.push_back(View(*data[i], 1.0f / static_cast<float>(i + 1)));
    tensors.push_back({data[i]->get(), kSizes[i]});
  }
  // What was there before must not show.
  std::vector<GradientScan> scans(kTensors, {.nonfinite = 9, .max_abs = 9, .block_sums = {9}});
  std::vector<StateScan> states(kTensors, {9, 9, 9});
  Check(backend_->Scan(gradients, scans));
  Check(backend_->ScanState(tensors, states));
  for (std::size_t i = 0; i < kTensors; ++i) {
    const GradientScan alone = testing::ScanOne(*backend_, gradients[i]);
    EXPECT_EQ(scans[i].nonfinite, 0u) << i;
    EXPECT_EQ(scans[i].max_abs, alone.max_abs) << i;
    EXPECT_EQ(scans[i].block_sums, alone.block_sums) << i;
    EXPECT_EQ(scans[i].block_sums.size(), BlockCount(kSizes[i])) << i;
    EXPECT_TRUE(SameScan(states[i], testing::ScanStateOne(*backend_, tensors[i].data, kSizes[i])));
  }
}

// Gradients of every dtype in one call, each with its own scale.
TEST_P(Batch, GradientsMayDifferInDtypeAndScale) {
  const std::vector<float> values{1, -2, 0.5f, 4};
  std::vector<std::unique_ptr<Bytes>> memory;
  std::vector<GradientView> gradients;
  const Buffer source(*backend_, values);
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16, Dtype::kBF16}) {
    unsigned char rounded[16];
    Check(backend_->Round(rounded, dtype, source.get(), 4));
    memory.push_back(std::make_unique<Bytes>(*backend_, rounded, sizeof(rounded)));
    const auto unscale = static_cast<float>(std::ldexp(1.0, -static_cast<int>(gradients.size())));
    gradients.push_back({memory.back()->get(), dtype, 4, unscale});
  }
  std::vector<GradientScan> scans(gradients.size());
  Check(backend_->Scan(gradients, scans));
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_EQ(scans[i].max_abs, std::ldexp(4.0, -static_cast<int>(i))) << i;
    EXPECT_EQ(scans[i].block_sums[0], std::ldexp(21.25, -2 * static_cast<int>(i))) << i;
  }
}

TEST_P(Batch, MomentaOfManyParametersAreThoseOfEach) {
  const auto g = Make(1), m = Make(2), alone_m = Make(2);
  const auto u = MakeIterates(), alone_u = MakeIterates();
  std::vector<MomentumJob> jobs;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const MomentumForm form = i % 2 == 0 ? MomentumForm::kEma : MomentumForm::kSum;
    jobs.push_back({.gradient = View(*g[i], 0.5f),
                    .rule = {.form = form,
                             .beta = 0.9 + 0.01 * static_cast<double>(i),
                             .nesterov = i % 3 != 0,
                             .gradient_scale = i == 4 ? 0.25 : 1},
                    .m = m[i]->get(),
                    .write_m = i != 5,
                    .u = u[i]->get(),
                    .u_scale = IterateScale(backend_->iterate_dtype(), 16)});
  }
  std::vector<StateScan> states(kTensors, {9, 9, 9});
  Check(backend_->Momentum(jobs, states));
  for (std::size_t i = 0; i < kTensors; ++i) {
    MomentumJob job = jobs[i];
    job.m = alone_m[i]->get();
    job.u = alone_u[i]->get();
    const StateScan alone = testing::MomentumOne(*backend_, job);
    EXPECT_TRUE(SameBits(m[i]->Read(), alone_m[i]->Read())) << i;
    EXPECT_TRUE(SameBits(u[i]->Read(), alone_u[i]->Read())) << i;
    EXPECT_TRUE(SameScan(states[i], job.write_m ? alone : StateScan{9, 9, 9})) << i;
  }
}

TEST_P(Batch, UpdatesOfManyTensorsAreThoseOfEach) {
  const auto w = Make(1), alone_w = Make(1), update = Make(2);
  const auto o = MakeIterates();
  std::vector<ApplyJob> jobs;
  for (std::size_t i = 0; i < kTensors; ++i) {
    Check(backend_->StoreIterate(o[i]->get(), update[i]->get(), kSizes[i], 1));
    jobs.push_back({.w = w[i]->get(),
                    .o = o[i]->get(),
                    .elements = kSizes[i],
                    .decay = 1 - 0.01 * static_cast<double>(i),
                    .step = 0.1 * static_cast<double>(i + 1)});
  }
  std::vector<StateScan> states(kTensors, {9, 9, 9});
  Check(backend_->Apply(jobs, states));
  for (std::size_t i = 0; i < kTensors; ++i) {
    ApplyJob job = jobs[i];
    job.w = alone_w[i]->get();
    EXPECT_TRUE(SameScan(states[i], testing::ApplyOne(*backend_, job))) << i;
    EXPECT_TRUE(SameBits(w[i]->Read(), alone_w[i]->Read())) << i;
  }
}

TEST_P(Batch, AdamWOfManyParametersIsThatOfEach) {
  const auto g = Make(1), w = Make(2), m = Make(3), v = Make(0);
  const auto alone_w = Make(2), alone_m = Make(3), alone_v = Make(0);
  std::vector<AdamWJob> jobs;
  for (std::size_t i = 0; i < kTensors; ++i) {
    jobs.push_back({.gradient = View(*g[i], 0.5f),
                    .rule = {.lr = 0.01 * static_cast<double>(i + 1), .t = 1 + static_cast<int>(i)},
                    .state = {w[i]->get(), m[i]->get(), v[i]->get()}});
  }
  std::vector<AdamWScan> scans(kTensors, {{9, 9, 9}, {9, 9, 9}, {9, 9, 9}});
  Check(backend_->AdamW(jobs, scans));
  for (std::size_t i = 0; i < kTensors; ++i) {
    AdamWJob job = jobs[i];
    job.state = {alone_w[i]->get(), alone_m[i]->get(), alone_v[i]->get()};
    const AdamWScan alone = testing::AdamWOne(*backend_, job);
    EXPECT_TRUE(SameScan(scans[i].weight, alone.weight)) << i;
    EXPECT_TRUE(SameScan(scans[i].exp_avg, alone.exp_avg)) << i;
    EXPECT_TRUE(SameScan(scans[i].exp_avg_sq, alone.exp_avg_sq)) << i;
    EXPECT_TRUE(SameBits(w[i]->Read(), alone_w[i]->Read())) << i;
    EXPECT_TRUE(SameBits(m[i]->Read(), alone_m[i]->Read())) << i;
    EXPECT_TRUE(SameBits(v[i]->Read(), alone_v[i]->Read())) << i;
  }
}

// The rounded copy that comes with an update holds the bits that Round would give.
TEST_P(Batch, RoundedCopiesAreThoseOfRound) {
  const std::size_t size = kBlockElements + 77;
  const Buffer g(*backend_, Gaussian(size, 1)), update(*backend_, Gaussian(size, 2));
  const IterateBuffer o(*backend_, size);
  Check(backend_->StoreIterate(o.get(), update.get(), size, 1));
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBF16, Dtype::kF16}) {
    for (const bool adamw : {false, true}) {
      const Buffer w(*backend_, Gaussian(size, 3)), m(*backend_, size), v(*backend_, size);
      const std::vector<unsigned char> before(size * DtypeBytes(dtype), 0xa5);
      const Bytes copy(*backend_, before.data(), before.size());
      const RoundedCopy rounded{copy.get(), dtype};
      if (adamw) {
        testing::AdamWOne(
            *backend_,
            {.gradient = View(g, 1), .state = {w.get(), m.get(), v.get()}, .rounded = rounded});
      } else {
        testing::ApplyOne(*backend_, {.w = w.get(),
                                      .o = o.get(),
                                      .elements = size,
                                      .decay = 0.9,
                                      .step = 0.1,
                                      .rounded = rounded});
      }
      std::vector<unsigned char> expected(before.size()), found(before.size());
      Check(backend_->Round(expected.data(), dtype, w.get(), size));
      copy.Read(found.data());
      EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size()), 0)
          << DtypeName(dtype) << (adamw ? " AdamW" : " Apply");
    }
  }
}

}  // namespace
}  // namespace muond::kernels
