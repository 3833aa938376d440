// A broken fast path: the result check, the fallback, and the failure that nothing can hide.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/conformance/kernels_driver.h"

namespace muond::kernels {
namespace {

using testing::BackendCase;
using testing::CaseName;
using testing::Check;
using testing::FallbackCases;
using testing::Gaussian;
using testing::IterateBuffer;
using testing::Orthogonalize;
using testing::Orthogonalized;

class FaultyFastPath : public ::testing::TestWithParam<BackendCase> {
 protected:
  void SetUp() override {
    backend_ = testing::MakeOrSkip(GetParam(), {.threads = 2, .newton_schulz_fault = &fault_});
  }

  NewtonSchulzFault fault_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Backend> reference_ = MakeReferenceBackend();
};
INSTANTIATE_TEST_SUITE_P(Backends, FaultyFastPath, ::testing::ValuesIn(FallbackCases()), CaseName);

TEST_P(FaultyFastPath, Dion76_BadResultIsRedoneByTheStandardPath) {
  // In fp32 again, of what the iterate dtype holds of U, and rounded to it once.
  const double tolerance = backend_->iterate_dtype() == Dtype::kF32 ? 1e-5 : 2e-3;
  for (const auto method : {NewtonSchulzMethod::kStandard, NewtonSchulzMethod::kGram}) {
    const NewtonSchulzRule rule = testing::RuleOf("simple", method);
    for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{20, 50}, {50, 20}}) {
      const std::vector<float> u = Gaussian(1000, 1);
      const Orthogonalized expected = Orthogonalize(*reference_, u, rows, cols, rule);
      fault_.fast_path = 1;
      const Orthogonalized found = Orthogonalize(*backend_, u, rows, cols, rule);
      EXPECT_EQ(fault_.fast_path, 0) << "the fault was never injected";
      EXPECT_TRUE(found.result.fallback);
      EXPECT_FALSE(found.result.failed);
      EXPECT_LE(testing::Distance(found.o, expected.o), tolerance * testing::Norm(expected.o));
      EXPECT_NEAR(found.result.output_norm, expected.result.output_norm, 10 * tolerance);
      const Orthogonalized next = Orthogonalize(*backend_, u, rows, cols, rule);
      EXPECT_FALSE(next.result.fallback) << "a fault of one result marks no other";
    }
  }
}

TEST_P(FaultyFastPath, Dion76_BrokenFallbackIsFailed) {
  fault_.fast_path = 1;
  fault_.fallback = 1;
  const Orthogonalized found = Orthogonalize(*backend_, Gaussian(12, 2), 3, 4);
  EXPECT_TRUE(found.result.fallback);
  EXPECT_TRUE(found.result.failed);
}

TEST_P(FaultyFastPath, OnlyTheBadMatrixOfABatchFallsBack) {
  const std::vector<float> u = Gaussian(5 * 12, 3);
  const IterateBuffer input(*backend_, u), output(*backend_, u.size());
  std::vector<MatrixJob> jobs;
  for (std::size_t i = 0; i < 5; ++i) {
    jobs.push_back({.u = input.get(12 * i),
                    .o = output.get(12 * i),
                    .rows = 3,
                    .cols = 4,
                    .u_scale = input.scale()});
  }
  std::vector<NewtonSchulzResult> results(5);
  fault_.fast_path = 2;
  Check(backend_->NewtonSchulz(jobs, testing::SimpleRule(), results));
  int fallbacks = 0;
  for (const NewtonSchulzResult& result : results) {
    fallbacks += result.fallback ? 1 : 0;
    EXPECT_FALSE(result.failed);
  }
  EXPECT_EQ(fallbacks, 2);
  for (const float value : output.Read()) EXPECT_TRUE(std::isfinite(value));
}

// Finite but far too large is as bad as a NaN. The steps themselves blow up here, so the fallback
// is no better, and that must show.
TEST_P(FaultyFastPath, ImplausibleNormIsCaught) {
  NewtonSchulzRule rule = testing::SimpleRule();
  rule.steps = {{100, 0, 0}};
  EXPECT_TRUE(Orthogonalize(*backend_, Gaussian(12, 4), 3, 4, rule).result.failed);
  EXPECT_TRUE(Orthogonalize(*reference_, Gaussian(12, 4), 3, 4, rule).result.failed);
  rule.residual_max = 1e5;
  EXPECT_FALSE(Orthogonalize(*backend_, Gaussian(12, 4), 3, 4, rule).result.failed);
}

TEST_P(FaultyFastPath, ZeroInputIsNoFault) {
  fault_.fast_path = 1;
  EXPECT_TRUE(Orthogonalize(*backend_, std::vector<float>(6), 2, 3).result.zero_input);
  EXPECT_EQ(fault_.fast_path, 1);
}

}  // namespace
}  // namespace muond::kernels
