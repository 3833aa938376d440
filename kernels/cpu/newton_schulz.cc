// Choice, check and fallback around the iterations.
#include "kernels/cpu/newton_schulz.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <string>

#include "kernels/coefficients.h"
#include "kernels/cpu/iteration.h"

namespace muond::kernels::cpu {
namespace {

// From this ratio of the sides on the Gram form was faster (docs/kernels.md); below this short side
// a matrix is too small to tell, and the standard form is the more accurate one.
constexpr double kGramSidesRatio = 1.5;
constexpr double kPairedSidesRatio = 1.25;
constexpr std::int64_t kGramShortSide = 512;
// Below this short side the rounding of bf16 shows in null directions, and its rate gains little.
constexpr std::int64_t kBF16ShortSide = 256;

// A matrix of at least this many multiply-adds per product is worth all threads.
constexpr std::int64_t kLargeWork = std::int64_t{512} * 512 * 512;
// Beyond this many elements every matrix gets all threads: scratch for each would be too much.
constexpr std::int64_t kHugeElements = std::int64_t{4} << 20;

// Spoils one result where a test asked for it.
void Inject(std::atomic<int>& remaining, float* o) {
  int left = remaining.load();
  while (left > 0 && !remaining.compare_exchange_weak(left, left - 1)) {
  }
  if (left > 0) o[0] = std::numeric_limits<float>::quiet_NaN();
}

bool IsPlausible(const BlockStats& stats, std::int64_t m, double residual_max) {
  return stats.nonfinite == 0 && IsPlausibleNorm(stats.sum_squares, m, residual_max);
}

bool IsLarge(const MatrixJob& job) {
  const auto [m, n] = std::minmax(job.rows, job.cols);
  return m * m >= (kLargeWork + n - 1) / std::max<std::int64_t>(n, 1);
}

bool IsHuge(std::int64_t rows, std::int64_t cols) { return rows * cols > kHugeElements; }

// The fallback's needs included.
std::size_t ScratchFloats(const Plan& plan, std::int64_t m, std::int64_t n) {
  if (!plan.bf16) return F32ScratchFloats(m, n, plan.gram);
  return std::max(BF16ScratchFloats(m, n), F32ScratchFloats(m, n, false));
}

}  // namespace

Plan ChoosePlan(const NewtonSchulzRule& rule, std::int64_t m, std::int64_t n, Products products) {
  const bool fp32_wanted = products == Products::kF32 || products == Products::kOpenBlas;
  Plan plan{.bf16 = !fp32_wanted && !rule.steps.empty() && m >= kBF16ShortSide};
  if (rule.method == NewtonSchulzMethod::kStandard || m == n || rule.steps.empty() ||
      !IsGramSafe(rule.steps)) {
    return plan;
  }
  const double ratio = static_cast<double>(n) / static_cast<double>(m);
  const bool pays =
      plan.bf16 ? ratio >= kPairedSidesRatio : m >= kGramShortSide && ratio >= kGramSidesRatio;
  plan.gram = pays || rule.method == NewtonSchulzMethod::kGram;
  return plan;
}

NewtonSchulzSolver::NewtonSchulzSolver(Workers* workers, const Passes* passes, Products products,
                                       NewtonSchulzFault* fault)
    : workers_(workers),
      passes_(passes),
      gemm_(products == Products::kOpenBlas ? &OpenBlasGemm() : &FastestF32Gemm()),
      products_(products),
      fault_(fault),
      scratch_(static_cast<std::size_t>(workers->threads())) {}

void NewtonSchulzSolver::Solve(const Loop& loop, const MatrixJob& job, const NewtonSchulzRule& rule,
                               HostScratch& scratch, NewtonSchulzResult& result) const {
  result = {};
  const std::int64_t m = std::min(job.rows, job.cols);
  const std::int64_t n = std::max(job.rows, job.cols);
  if (m == 0) {
    result.zero_input = true;
    return;
  }
  const Plan plan = ChoosePlan(rule, m, n, products_);
  float* memory = scratch.Reserve(ScratchFloats(plan, m, n));
  if (memory == nullptr) throw std::bad_alloc();
  const IterationTools tools{loop, *passes_, *gemm_};
  if (!(plan.bf16 ? IterateBF16(tools, job, rule, plan.gram, memory)
                  : IterateF32(tools, job, rule, plan.gram, memory))) {
    result.zero_input = true;
    return;
  }
  auto* const o = static_cast<float*>(job.o);
  if (fault_ != nullptr) Inject(fault_->fast_path, o);
  BlockStats stats = Observe(tools, o, m * n);
  if (!IsPlausible(stats, m, rule.residual_max)) {
    result.fallback = true;
    IterateF32(tools, job, rule, false, memory);
    if (fault_ != nullptr) Inject(fault_->fallback, o);
    stats = Observe(tools, o, m * n);
    result.failed = !IsPlausible(stats, m, rule.residual_max);
  }
  result.output_norm = std::sqrt(stats.sum_squares);
}

void NewtonSchulzSolver::Divide(std::span<const MatrixJob> jobs) {
  together_.clear();
  alone_.clear();
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    (IsHuge(jobs[i].rows, jobs[i].cols) ? together_ : alone_).push_back(i);
  }
  // Large ones first: the small ones fill the gaps at the end.
  const auto large_end = std::stable_partition(alone_.begin(), alone_.end(),
                                               [&](std::size_t i) { return IsLarge(jobs[i]); });
  std::stable_sort(alone_.begin(), large_end, [&](std::size_t left, std::size_t right) {
    return jobs[left].rows * jobs[left].cols > jobs[right].rows * jobs[right].cols;
  });
  // The large ones that do not come to one for every thread would leave threads idle. With fewer
  // jobs than threads that goes for small ones, too.
  const auto large = static_cast<std::size_t>(large_end - alone_.begin());
  const std::size_t rest =
      alone_.size() < scratch_.size() ? alone_.size() : large % scratch_.size();
  const auto rest_end = alone_.begin() + static_cast<std::ptrdiff_t>(rest);
  together_.insert(together_.end(), alone_.begin(), rest_end);
  alone_.erase(alone_.begin(), rest_end);
}

Error NewtonSchulzSolver::Run(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                              std::span<NewtonSchulzResult> results) {
  try {
    Divide(jobs);
    const Loop together(workers_);
    for (const std::size_t i : together_) {
      Solve(together, jobs[i], rule, scratch_[0], results[i]);
    }
    const Loop alone(nullptr);
    workers_->ForEachTask(alone_.size(), [&](std::size_t k) {
      const std::size_t i = alone_[k];
      Solve(alone, jobs[i], rule, scratch_[workers_->CurrentThread()], results[i]);
    });
  } catch (const std::bad_alloc&) {
    return Error("newton-schulz: no host memory left for scratch");
  } catch (const std::exception& error) {
    return Error(std::string("newton-schulz: ") + error.what());
  }
  return {};
}

std::size_t NewtonSchulzSolver::ScratchBytes(std::int64_t rows, std::int64_t cols) const {
  const auto [m, n] = std::minmax(rows, cols);
  const std::size_t slots = IsHuge(rows, cols) ? 1 : scratch_.size();
  const std::size_t floats = std::max(ScratchFloats({.bf16 = false, .gram = true}, m, n),
                                      products_ == Products::kAuto || products_ == Products::kBF16
                                          ? ScratchFloats({.bf16 = true}, m, n)
                                          : 0);
  return slots * floats * sizeof(float);
}

}  // namespace muond::kernels::cpu
