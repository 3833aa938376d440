// The same arguments give the same bits: whatever the threads, the batch, the instruction set.
#include <cblas.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/passes.h"
#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::Buffer;
using testing::Check;
using testing::Gaussian;
using testing::IterateBuffer;
using testing::Orthogonalize;
using testing::SameBits;

constexpr std::pair<std::int64_t, std::int64_t> kShapes[] = {{5, 3},     {64, 64},    {129, 300},
                                                             {600, 260}, {520, 1100}, {3, 700}};

std::vector<float> InputOf(std::int64_t rows, std::int64_t cols) {
  return Gaussian(static_cast<std::size_t>(rows * cols), static_cast<unsigned>(rows + cols));
}

TEST(Determinism, NewtonSchulzIgnoresTheNumberOfThreads) {
  const auto one = MakeCpuBackend({.threads = 1});
  const auto two = MakeCpuBackend({.threads = 2});
  const auto four = MakeCpuBackend({.threads = 4});
  for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
    const NewtonSchulzRule rule = testing::RuleOf("simple", method);
    for (const auto& [rows, cols] : kShapes) {
      const std::vector<float> u = InputOf(rows, cols);
      const auto expected = Orthogonalize(*one, u, rows, cols, rule);
      for (Backend* backend : {two.get(), four.get()}) {
        for (int repeat = 0; repeat < 2; ++repeat) {
          const auto found = Orthogonalize(*backend, u, rows, cols, rule);
          EXPECT_TRUE(SameBits(found.o, expected.o)) << rows << " x " << cols;
          EXPECT_EQ(found.result.output_norm, expected.result.output_norm);
        }
      }
    }
  }
}

TEST(Determinism, ElementwisePassesIgnoreTheNumberOfThreads) {
  const std::size_t size = 5 * kBlockElements + 321;
  const std::vector<float> gradient = Gaussian(size, 1), weights = Gaussian(size, 2);
  std::vector<float> expected_w, expected_m;
  std::vector<double> expected_sums;
  for (const int threads : {1, 2, 4, 4}) {
    const auto backend = MakeCpuBackend({.threads = threads});
    const Buffer g(*backend, gradient), w(*backend, weights), m(*backend, size), v(*backend, size),
        u(*backend, size);
    const GradientView view{g.get(), Dtype::kF32, size, 0.5f};
    const GradientScan scan = testing::ScanOne(*backend, view);
    const AdamWScan adamw =
        testing::AdamWOne(*backend, {.gradient = view, .state = {w.get(), m.get(), v.get()}});
    const StateScan momentum =
        testing::MomentumOne(*backend, {.gradient = view, .m = m.get(), .u = u.get()});
    const StateScan apply = testing::ApplyOne(
        *backend, {.w = w.get(), .o = u.get(), .elements = size, .decay = 0.9, .step = 0.1});
    std::vector<double> sums = scan.block_sums;
    sums.insert(sums.end(),
                {adamw.weight.sum_squares, adamw.exp_avg.sum_squares, adamw.exp_avg_sq.sum_squares,
                 momentum.sum_squares, apply.sum_squares});
    if (expected_w.empty()) {
      expected_w = w.Read();
      expected_m = m.Read();
      expected_sums = sums;
    }
    EXPECT_TRUE(SameBits(w.Read(), expected_w)) << threads;
    EXPECT_TRUE(SameBits(m.Read(), expected_m)) << threads;
    EXPECT_EQ(sums, expected_sums) << threads;
  }
}

// Enough work that every thread gets some at the same time.
TEST(Determinism, MatricesThatRunSideBySideDoNotMeet) {
  const auto one = MakeCpuBackend({.threads = 1});
  const auto four = MakeCpuBackend({.threads = 4});
  constexpr std::size_t kJobs = 64;
  constexpr std::size_t kCount = 96 * 130;
  const std::vector<float> u = Gaussian(kJobs * kCount, 5);
  std::vector<std::vector<float>> outputs;
  for (Backend* backend : {one.get(), four.get()}) {
    const IterateBuffer input(*backend, u), output(*backend, u.size());
    std::vector<MatrixJob> jobs;
    for (std::size_t i = 0; i < kJobs; ++i) {
      const bool wide = i % 2 == 0;
      jobs.push_back({.u = input.get(i * kCount),
                      .o = output.get(i * kCount),
                      .rows = wide ? 96 : 130,
                      .cols = wide ? 130 : 96});
    }
    std::vector<NewtonSchulzResult> results(kJobs);
    Check(backend->NewtonSchulz(jobs, testing::SimpleRule(), results));
    for (const NewtonSchulzResult& result : results) {
      EXPECT_FALSE(result.fallback || result.failed || result.zero_input);
    }
    outputs.push_back(output.Read());
  }
  EXPECT_TRUE(SameBits(outputs[0], outputs[1]));
}

// OpenBLAS's own threads would cut sums by the core count of the machine.
TEST(Determinism, BlasRunsOnTheCallingThread) {
  openblas_set_num_threads(2);
  const auto backend = MakeCpuBackend({.products = Products::kOpenBlas});
  Orthogonalize(*backend, {3, 0, 0, 4}, 2, 2);
  EXPECT_EQ(openblas_get_num_threads(), 1);
}

// What the passes of one instruction set make of one block.
struct Outcome {
  std::vector<float> floats;
  std::vector<std::uint16_t> halves;
  std::vector<double> sums;
};

Outcome RunAllPasses(const cpu::Passes& passes, const std::vector<std::uint16_t>& gradient,
                     Dtype dtype, std::size_t n) {
  std::vector<float> w = Gaussian(n, 1), m = Gaussian(n, 2), u(n), acc = Gaussian(n, 4);
  std::vector<float> v(n, 0.25f);
  const cpu::GradientBlock block{gradient.data(), dtype, 0.5f, 0.75, n};
  cpu::BlockStats stats[11] = {};
  passes.scan(block, &stats[0]);
  passes.scan({w.data(), Dtype::kF32, 1.0f, 1.0, n}, &stats[1]);
  passes.accumulate(acc.data(), gradient.data(), dtype, n, false);
  int i = 2;
  for (const auto& [ema, nesterov] : {std::pair{true, true}, {true, false}, {false, true}}) {
    passes.momentum(block, {ema, nesterov, 0.95, 0.5}, m.data(), true, u.data(), &stats[i++]);
  }
  Outcome outcome;
  outcome.halves.resize(3 * n);
  void* const half_m = outcome.halves.data() + 2 * n;
  passes.round(half_m, Dtype::kBF16, m.data(), n);
  passes.momentum(block, {true, true, 0.95, 0.5, Dtype::kBF16}, half_m, true, acc.data(),
                  &stats[9]);
  passes.scan({half_m, Dtype::kBF16, 1.0f, 1.0, n}, &stats[10]);
  passes.apply(w.data(), u.data(), n, 0.9, 0.1, {outcome.halves.data(), Dtype::kBF16}, &stats[5]);
  passes.adamw(block, {0.9, 0.999, 1e-8, 0.99, 0.01, 31.6}, w.data(), m.data(), v.data(),
               {outcome.halves.data() + n, Dtype::kF16}, &stats[6]);
  passes.scale(u.data(), u.data(), 1 / 3.0, n);
  for (const auto* values : {&w, &m, &v, &u, &acc}) {
    outcome.floats.insert(outcome.floats.end(), values->begin(), values->end());
  }
  for (const Dtype to : {Dtype::kBF16, Dtype::kF16}) {
    std::vector<std::uint16_t> rounded(n);
    passes.round(rounded.data(), to, w.data(), n);
    outcome.halves.insert(outcome.halves.end(), rounded.begin(), rounded.end());
  }
  for (const cpu::BlockStats& s : stats) {
    outcome.sums.insert(outcome.sums.end(),
                        {static_cast<double>(s.nonfinite), s.max_abs, s.sum_squares});
  }
  return outcome;
}

TEST(Determinism, EveryInstructionSetGivesTheSameBits) {
  const cpu::Passes* const* tables = cpu::SupportedPasses();
  ASSERT_NE(tables[0], nullptr);
  for (const std::size_t n : {1, 15, 16, 17, 511, 512, 513, 4099}) {
    for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
      std::vector<std::uint16_t> gradient(n);
      for (std::size_t i = 0; i < n; ++i) {
        const float value = std::sin(static_cast<float>(i) * 1.7f) * 3e-4f;
        gradient[i] = dtype == Dtype::kBF16 ? FloatToBF16(value) : FloatToF16(value);
      }
      const Outcome expected = RunAllPasses(*tables[0], gradient, dtype, n);
      for (const cpu::Passes* const* other = tables + 1; *other != nullptr; ++other) {
        const Outcome found = RunAllPasses(**other, gradient, dtype, n);
        EXPECT_TRUE(SameBits(found.floats, expected.floats)) << (*other)->isa << " " << n;
        EXPECT_EQ(found.halves, expected.halves) << (*other)->isa << " " << n;
        EXPECT_EQ(found.sums, expected.sums) << (*other)->isa << " " << n;
      }
    }
  }
}

TEST(Determinism, EveryInstructionSetConvertsEveryPatternAlike) {
  std::vector<std::uint16_t> patterns(0x10000);
  std::vector<float> floats(0x10000);
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    patterns[i] = static_cast<std::uint16_t>(i);
    const std::uint32_t bits = i << 16 | (i * 2654435761u) >> 16;
    std::memcpy(&floats[i], &bits, sizeof(bits));
  }
  for (const cpu::Passes* const* table = cpu::SupportedPasses(); *table != nullptr; ++table) {
    std::vector<float> acc(0x10000);
    (*table)->accumulate(acc.data(), patterns.data(), Dtype::kF16, acc.size(), true);
    std::vector<std::uint16_t> f16(0x10000), bf16(0x10000);
    (*table)->round(f16.data(), Dtype::kF16, floats.data(), floats.size());
    (*table)->round(bf16.data(), Dtype::kBF16, floats.data(), floats.size());
    for (std::uint32_t i = 0; i < 0x10000; ++i) {
      const float widened = F16ToFloat(patterns[i]);
      ASSERT_EQ(std::memcmp(&acc[i], &widened, 4), 0) << (*table)->isa << " " << i;
      ASSERT_EQ(f16[i], FloatToF16(floats[i])) << (*table)->isa << " " << i;
      ASSERT_EQ(bf16[i], FloatToBF16(floats[i])) << (*table)->isa << " " << i;
    }
  }
}

}  // namespace
}  // namespace muond::kernels
