// Newton-Schulz in fp32, after KellerJordan/Muon (standard form) and Dao-AILab/gram-newton-schulz
// (Gram form: the iteration runs on R = X X^T and on the polynomial Q in R, and X is multiplied
// only at the restart and at the end).
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/cpu/iteration.h"
#include "kernels/cpu/products.h"

namespace muond::kernels::cpu {
namespace {

constexpr std::size_t kGramRestart = 2;

std::size_t Padded(std::int64_t floats) {
  return (static_cast<std::size_t>(floats) + 15) / 16 * 16;
}

// X lives in two buffers of m x n that take turns: `o` and scratch.
class Iteration {
 public:
  Iteration(const IterationTools& tools, const MatrixJob& job, float* scratch)
      : tools_(tools),
        loop_(tools.loop),
        job_(job),
        u_(static_cast<const float*>(job.u)),
        o_(static_cast<float*>(job.o)),
        transposed_(job.rows > job.cols),
        m_(std::min(job.rows, job.cols)),
        n_(std::max(job.rows, job.cols)),
        spare_(scratch),
        squares_(scratch + Padded(m_ * n_)) {}

  bool Run(const NewtonSchulzRule& rule, bool gram) {
    const std::size_t products =
        !gram ? rule.steps.size() : (rule.steps.size() > kGramRestart ? 2 : 1);
    // The last product must land in `o`, or in scratch where it is still to be transposed.
    const bool start_in_o = (products % 2 == 0) != transposed_;
    x_ = start_in_o ? o_ : spare_;
    y_ = start_in_o ? spare_ : o_;
    // U comes scaled, and so must the floor.
    if (!Normalize(rule.norm_floor * job_.u_scale)) {
      std::fill_n(o_, m_ * n_, 0.0f);
      return false;
    }
    if (gram) {
      IterateGram(rule.steps);
    } else {
      IterateStandard(rule.steps);
    }
    if (transposed_) Transpose(loop_, tools_.passes, x_, m_, n_, o_);
    return true;
  }

 private:
  // x_ = U / max(|U|_F, floor) in the wide view. The sum of squares of fp32 numbers, subnormal or
  // huge, is exact enough in fp64 without scaling by max |U| first, so the result is scale-free.
  bool Normalize(double floor) {
    const float* source = u_;
    if (transposed_) {
      // Summed after transposing: a matrix and its transpose get the same bits.
      Transpose(loop_, tools_.passes, u_, job_.rows, job_.cols, x_);
      source = x_;
    }
    const double factor = NormalizingFactor(Observe(tools_, source, m_ * n_), floor);
    if (factor == 0) return false;
    const auto elements = static_cast<std::size_t>(m_ * n_);
    loop_.ForEach(BlockCount(elements), [&](std::size_t i) {
      const std::size_t begin = i * kBlockElements;
      tools_.passes.scale(x_ + begin, source + begin, factor,
                          std::min(kBlockElements, elements - begin));
    });
    return true;
  }

  float* Square(std::size_t i) const { return squares_ + i * Padded(m_ * m_); }

  // result = X X^T.
  void MultiplyGram(float* result) const {
    Multiply(loop_, tools_.gemm, tools_.passes,
             SymmetricProduct{.a = x_, .b = x_, .m = m_, .k = n_}, result);
  }

  // result = a I + b R + c R^2. The a I stays in fp32, so the sum rounds no worse than a X would.
  void MultiplyStep(const NewtonSchulzStep& step, const float* r, float* result) const {
    Multiply(loop_, tools_.gemm, tools_.passes,
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
    Multiply(loop_, tools_.gemm, tools_.passes, SymmetricProduct{.a = a, .b = b, .m = m_, .k = m_},
             result);
  }

  // X <- A X.
  void MultiplyX(const float* a) {
    Multiply(loop_, tools_.gemm, a, x_, m_, n_, y_);
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

  const IterationTools& tools_;
  const Loop& loop_;
  const MatrixJob& job_;
  const float* const u_;
  float* const o_;
  const bool transposed_;
  const std::int64_t m_, n_;
  float* const spare_;
  float* const squares_;
  float* x_ = nullptr;
  float* y_ = nullptr;
};

}  // namespace

BlockStats Observe(const IterationTools& tools, const float* data, std::int64_t count) {
  const auto elements = static_cast<std::size_t>(count);
  std::vector<BlockStats> blocks(BlockCount(elements));
  tools.loop.ForEach(blocks.size(), [&](std::size_t i) {
    const std::size_t begin = i * kBlockElements;
    tools.passes.scan({data + begin, Dtype::kF32, 1.0f, 1.0,
                       std::min(kBlockElements, elements - begin)},
                      &blocks[i]);
  });
  BlockStats total{};
  for (const BlockStats& block : blocks) {
    total.nonfinite += block.nonfinite;
    total.max_abs = std::max(total.max_abs, block.max_abs);
    total.sum_squares += block.sum_squares;
  }
  return total;
}

double NormalizingFactor(const BlockStats& u, double floor) {
  if (u.nonfinite > 0) return std::numeric_limits<double>::quiet_NaN();
  if (u.sum_squares == 0) return 0;
  return 1.0 / std::max(std::sqrt(u.sum_squares), floor);
}

bool IterateF32(const IterationTools& tools, const MatrixJob& job, const NewtonSchulzRule& rule,
                bool gram, float* scratch) {
  return Iteration(tools, job, scratch).Run(rule, gram);
}

std::size_t F32ScratchFloats(std::int64_t m, std::int64_t n, bool gram) {
  return Padded(m * n) + (gram ? 4 : 2) * Padded(m * m);
}

}  // namespace muond::kernels::cpu
