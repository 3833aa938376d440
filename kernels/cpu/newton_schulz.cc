// Newton-Schulz in fp32 on the CPU, after KellerJordan/Muon (standard form) and
// Dao-AILab/gram-newton-schulz (Gram form: the iteration runs on R = X X^T and on the polynomial Q
// in R, and X is multiplied only at the restart and at the end).
#include "kernels/cpu/newton_schulz.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include "kernels/coefficients.h"
#include "kernels/cpu/products.h"

namespace muond::kernels::cpu {
namespace {

// From this ratio of the sides on the Gram form was faster (kernels/cpu_benchmark.cc); below this
// short side a matrix is too small to tell, and the standard form is the more accurate one.
constexpr double kGramSidesRatio = 1.5;
constexpr std::int64_t kGramShortSide = 512;
constexpr std::size_t kGramRestart = 2;

// A matrix of at least this many multiply-adds per product is worth all threads.
constexpr std::int64_t kSharedWork = std::int64_t{512} * 512 * 512;

std::size_t Padded(std::int64_t floats) {
  return (static_cast<std::size_t>(floats) + 15) / 16 * 16;
}

std::size_t ScratchFloats(std::int64_t m, std::int64_t n, NewtonSchulzMethod method) {
  const std::size_t squares = method == NewtonSchulzMethod::kGram ? 4 : 2;
  return Padded(m * n) + squares * Padded(m * m);
}

// One attempt at one matrix. X lives in two buffers of m x n that take turns: `o` and scratch.
class Attempt {
 public:
  Attempt(const Loop& loop, const Passes& passes, const MatrixJob& job, float* scratch)
      : loop_(loop),
        passes_(passes),
        job_(job),
        transposed_(job.rows > job.cols),
        m_(std::min(job.rows, job.cols)),
        n_(std::max(job.rows, job.cols)),
        spare_(scratch),
        squares_(scratch + Padded(m_ * n_)) {}

  // Fills job.o; false when U = 0.
  bool Run(const NewtonSchulzRule& rule, NewtonSchulzMethod method) {
    const bool gram = method == NewtonSchulzMethod::kGram;
    const std::size_t products =
        !gram ? rule.steps.size() : (rule.steps.size() > kGramRestart ? 2 : 1);
    // The last product must land in `o`, or in scratch where it is still to be transposed.
    const bool start_in_o = (products % 2 == 0) != transposed_;
    x_ = start_in_o ? job_.o : spare_;
    y_ = start_in_o ? spare_ : job_.o;
    if (!Normalize(rule.norm_floor)) {
      std::fill_n(job_.o, m_ * n_, 0.0f);
      return false;
    }
    if (gram) {
      IterateGram(rule.steps);
    } else {
      IterateStandard(rule.steps);
    }
    if (transposed_) Transpose(loop_, x_, m_, n_, job_.o);
    return true;
  }

  // Statistics of `count` floats, summed in block order.
  BlockStats Observe(const float* data, std::int64_t count) const {
    const auto elements = static_cast<std::size_t>(count);
    std::vector<BlockStats> blocks(BlockCount(elements));
    loop_.ForEach(blocks.size(), [&](std::size_t i) {
      const std::size_t begin = i * kBlockElements;
      passes_.scan_state(data + begin, std::min(kBlockElements, elements - begin), &blocks[i]);
    });
    BlockStats total{};
    for (const BlockStats& block : blocks) {
      total.nonfinite += block.nonfinite;
      total.max_abs = std::max(total.max_abs, block.max_abs);
      total.sum_squares += block.sum_squares;
    }
    return total;
  }

 private:
  // x_ = U / max(|U|_F, floor) in the wide view. The sum of squares of fp32 numbers, subnormal or
  // huge, is exact enough in fp64 without scaling by max |U| first, so the result is scale-free.
  bool Normalize(double floor) {
    const float* source = job_.u;
    if (transposed_) {
      // Summed after transposing: a matrix and its transpose get the same bits.
      Transpose(loop_, job_.u, job_.rows, job_.cols, x_);
      source = x_;
    }
    const BlockStats stats = Observe(source, m_ * n_);
    if (stats.nonfinite == 0 && stats.sum_squares == 0) return false;
    // A non-finite U is the caller's or the hardware's fault; it must come out as a failed result.
    const double factor = stats.nonfinite > 0 ? std::numeric_limits<double>::quiet_NaN()
                                              : 1.0 / std::max(std::sqrt(stats.sum_squares), floor);
    const auto elements = static_cast<std::size_t>(m_ * n_);
    loop_.ForEach(BlockCount(elements), [&](std::size_t i) {
      const std::size_t begin = i * kBlockElements;
      passes_.scale(x_ + begin, source + begin, factor, std::min(kBlockElements, elements - begin));
    });
    return true;
  }

  float* Square(std::size_t i) const { return squares_ + i * Padded(m_ * m_); }

  // result = X X^T.
  void MultiplyGram(float* result) const {
    Multiply(loop_, SymmetricProduct{.a = x_, .b = x_, .m = m_, .k = n_}, result);
  }

  // result = a I + b R + c R^2. The a I stays in fp32, so the sum rounds no worse than a X would.
  void MultiplyStep(const NewtonSchulzStep& step, const float* r, float* result) const {
    Multiply(loop_,
             SymmetricProduct{.a = r,
                              .b = r,
                              .m = m_,
                              .k = m_,
                              .alpha = static_cast<float>(step.c),
                              .beta = static_cast<float>(step.b),
                              .d = r,
                              .diagonal = static_cast<float>(step.a)},
             result);
  }

  void MultiplySymmetric(const float* a, const float* b, float* result) const {
    Multiply(loop_, SymmetricProduct{.a = a, .b = b, .m = m_, .k = m_}, result);
  }

  // X <- A X.
  void MultiplyX(const float* a) {
    Multiply(loop_, a, x_, m_, n_, y_);
    std::swap(x_, y_);
  }

  void IterateStandard(std::span<const NewtonSchulzStep> steps) {
    for (const NewtonSchulzStep& step : steps) {
      MultiplyGram(Square(0));
      MultiplyStep(step, Square(0), Square(1));
      MultiplyX(Square(1));
    }
  }

  void IterateGram(std::span<const NewtonSchulzStep> steps) {
    float* r = Square(0);
    float* z = Square(1);
    float* q = Square(2);
    float* spare = Square(3);
    bool fresh = true;  // Q = I
    MultiplyGram(r);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const bool last = i + 1 == steps.size();
      MultiplyStep(steps[i], r, z);
      const float* z_used = z;
      if (fresh) {
        std::swap(q, z);
        z_used = q;
      } else {
        MultiplySymmetric(q, z, spare);
        std::swap(q, spare);
      }
      fresh = last || i + 1 == kGramRestart;
      if (fresh) {
        MultiplyX(q);
        if (!last) MultiplyGram(r);
      } else {
        MultiplySymmetric(r, z_used, spare);
        MultiplySymmetric(spare, z_used, r);
      }
    }
  }

  const Loop& loop_;
  const Passes& passes_;
  const MatrixJob& job_;
  const bool transposed_;
  const std::int64_t m_, n_;
  float* const spare_;
  float* const squares_;
  float* x_ = nullptr;
  float* y_ = nullptr;
};

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

NewtonSchulzResult Solve(const Loop& loop, const Passes& passes, const MatrixJob& job,
                         const NewtonSchulzRule& rule, NewtonSchulzFault* fault, float* scratch) {
  const std::int64_t m = std::min(job.rows, job.cols);
  const std::int64_t n = std::max(job.rows, job.cols);
  NewtonSchulzResult result;
  if (m == 0) {
    result.zero_input = true;
    return result;
  }
  Attempt attempt(loop, passes, job, scratch);
  if (!attempt.Run(rule, ChooseMethod(rule, m, n))) {
    result.zero_input = true;
    return result;
  }
  if (fault != nullptr) Inject(fault->fast_path, job.o);
  BlockStats stats = attempt.Observe(job.o, m * n);
  if (!IsPlausible(stats, m, rule.residual_max)) {
    result.fallback = true;
    attempt.Run(rule, NewtonSchulzMethod::kStandard);
    if (fault != nullptr) Inject(fault->fallback, job.o);
    stats = attempt.Observe(job.o, m * n);
    result.failed = !IsPlausible(stats, m, rule.residual_max);
  }
  result.output_norm = std::sqrt(stats.sum_squares);
  return result;
}

bool IsShared(std::int64_t rows, std::int64_t cols) {
  const auto [m, n] = std::minmax(rows, cols);
  return m * m >= (kSharedWork + n - 1) / std::max<std::int64_t>(n, 1);
}

}  // namespace

NewtonSchulzMethod ChooseMethod(const NewtonSchulzRule& rule, std::int64_t m, std::int64_t n) {
  if (rule.method == NewtonSchulzMethod::kStandard || m == n || rule.steps.empty() ||
      !IsGramSafe(rule.steps)) {
    return NewtonSchulzMethod::kStandard;
  }
  if (rule.method == NewtonSchulzMethod::kGram) return NewtonSchulzMethod::kGram;
  const bool pays =
      m >= kGramShortSide && static_cast<double>(n) >= kGramSidesRatio * static_cast<double>(m);
  return pays ? NewtonSchulzMethod::kGram : NewtonSchulzMethod::kStandard;
}

NewtonSchulzSolver::NewtonSchulzSolver(Workers* workers, const Passes* passes,
                                       NewtonSchulzFault* fault)
    : workers_(workers),
      passes_(passes),
      fault_(fault),
      scratch_(static_cast<std::size_t>(workers->threads())) {}

Error NewtonSchulzSolver::Run(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                              std::span<NewtonSchulzResult> results) {
  std::atomic<bool> out_of_memory{false};
  const auto solve = [&](const Loop& loop, std::size_t i, std::size_t thread) {
    const MatrixJob& job = jobs[i];
    const auto [m, n] = std::minmax(job.rows, job.cols);
    float* scratch = scratch_[thread].Reserve(ScratchFloats(m, n, ChooseMethod(rule, m, n)));
    if (scratch == nullptr) {
      out_of_memory = true;
      return;
    }
    results[i] = Solve(loop, *passes_, job, rule, fault_, scratch);
  };
  try {
    std::vector<std::size_t> small;
    const bool few = jobs.size() < scratch_.size();
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      if (few || IsShared(jobs[i].rows, jobs[i].cols)) {
        solve(Loop(workers_), i, 0);
      } else {
        small.push_back(i);
      }
    }
    const Loop alone(nullptr);
    workers_->ForEach(small.size(),
                      [&](std::size_t k) { solve(alone, small[k], workers_->CurrentThread()); });
  } catch (const std::bad_alloc&) {
    out_of_memory = true;
  }
  if (out_of_memory) return Error("newton-schulz: no host memory left for scratch");
  return {};
}

std::size_t NewtonSchulzSolver::ScratchBytes(std::int64_t rows, std::int64_t cols) const {
  const auto [m, n] = std::minmax(rows, cols);
  const std::size_t slots = IsShared(rows, cols) ? 1 : scratch_.size();
  return slots * ScratchFloats(m, n, NewtonSchulzMethod::kGram) * sizeof(float);
}

}  // namespace muond::kernels::cpu
