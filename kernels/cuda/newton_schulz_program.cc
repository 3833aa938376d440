// Standard form after KellerJordan/Muon, Gram form after Dao-AILab/gram-newton-schulz: the
// iteration runs on R = X X^T and on the polynomial Q in R; X is multiplied at the restart and at
// the end.
//
// The identity's share of a step's polynomial, a I, is added in fp32 before the sum is rounded to
// 16 bits; a X is never added apart. All that commutes is symmetric and computed once, R exactly
// so. Only Q, which meets X, is a plain product Z Q: with Q mirrored from one triangle, what
// rounding puts between its factors leaks into the null directions of X, and a rank-deficient U
// comes out up to seven times worse than by the standard form; so it comes out the same
// (kernels/lab/README.md).
#include "kernels/cuda/newton_schulz_program.h"

#include <algorithm>
#include <utility>

#include "kernels/coefficients.h"

namespace muond::kernels::cuda {
namespace {

// From this ratio of the sides on the Gram form was faster (kernels/lab/README.md).
constexpr double kGramSidesRatio = 1.5;
constexpr std::int64_t kGramShortSide = 256;
constexpr std::size_t kGramRestart = 2;

class Builder {
 public:
  Builder(std::int64_t rows, std::int64_t cols, const ProgramBuffers& buffers, int applications)
      : tall_(rows > cols),
        rows_(static_cast<std::int32_t>(rows)),
        cols_(static_cast<std::int32_t>(cols)),
        m_(std::min(rows_, cols_)),
        n_(std::max(rows_, cols_)),
        buffers_(buffers),
        x_(buffers.u),
        // The last application must land in o; they take turns with the spare buffer.
        next_(applications % 2 == 1 ? buffers.o : buffers.spare),
        after_(applications % 2 == 1 ? buffers.spare : buffers.o),
        remaining_(applications) {}

  // r = X X^T.
  GemmOp Gram(const GemmOperand& r) const {
    GemmOp op = Symmetric(x_, x_, r);
    op.k = n_;
    op.layout = tall_ ? GemmLayout::kTN : GemmLayout::kNT;
    op.scale = fresh_ ? &buffers_.scalars->squared : &buffers_.scalars->scale_squared;
    return op;
  }

  // z = a I + b R + c R^2.
  GemmOp Polynomial(const NewtonSchulzStep& step, const GemmOperand& r,
                    const GemmOperand& z) const {
    GemmOp op = Symmetric(r, r, z);
    op.alpha = static_cast<float>(step.c);
    op.beta = static_cast<float>(step.b);
    op.diagonal = static_cast<float>(step.a);
    op.c = r.data;
    op.ldc = static_cast<std::int32_t>(r.ld);
    return op;
  }

  // d = A B for polynomials A and B in one symmetric matrix: they commute, so d is symmetric, too.
  GemmOp Symmetric(const GemmOperand& a, const GemmOperand& b, const GemmOperand& d) const {
    GemmOp op;
    op.a = a;
    op.b = b;
    op.d = d;
    op.rows = op.cols = op.k = m_;
    op.symmetric = 1;
    return op;
  }

  // d = Z Q.
  GemmOp Multiply(const GemmOperand& z, const GemmOperand& q, const GemmOperand& d) const {
    GemmOp op = Symmetric(z, q, d);
    op.layout = GemmLayout::kNN;
    op.symmetric = 0;
    return op;
  }

  // X <- Q X.
  GemmOp Apply(const GemmOperand& q) {
    GemmOp op;
    op.a = tall_ ? x_ : q;
    op.b = tall_ ? q : x_;
    op.d = next_;
    op.rows = rows_;
    op.cols = cols_;
    op.k = m_;
    op.layout = tall_ ? GemmLayout::kNT : GemmLayout::kNN;
    if (fresh_) op.scale = &buffers_.scalars->to_iterate;
    if (--remaining_ == 0) op.sums = buffers_.sums;
    fresh_ = false;
    x_ = next_;
    std::swap(next_, after_);
    return op;
  }

 private:
  const bool tall_;
  const std::int32_t rows_, cols_, m_, n_;
  const ProgramBuffers& buffers_;
  bool fresh_ = true;  // X is still U
  GemmOperand x_, next_, after_;
  int remaining_;
};

using Phases = std::vector<std::vector<GemmOp>>;

Phases Standard(std::span<const NewtonSchulzStep> steps, Builder& builder,
                const ProgramBuffers& buffers) {
  Phases phases;
  for (const NewtonSchulzStep& step : steps) {
    phases.push_back({builder.Gram(buffers.squares[0])});
    phases.push_back({builder.Polynomial(step, buffers.squares[0], buffers.squares[1])});
    phases.push_back({builder.Apply(buffers.squares[1])});
  }
  return phases;
}

Phases Gram(std::span<const NewtonSchulzStep> steps, Builder& builder,
            const ProgramBuffers& buffers) {
  GemmOperand r = buffers.squares[0], z = buffers.squares[1], q = buffers.squares[2];
  GemmOperand q_next = buffers.squares[3];
  const GemmOperand t = buffers.squares[4];
  Phases phases;
  bool first = true;  // Q = I
  phases.push_back({builder.Gram(r)});
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const bool last = i + 1 == steps.size();
    const bool apply = last || i + 1 == kGramRestart;
    phases.push_back({builder.Polynomial(steps[i], r, z)});
    // Q <- Z Q and R <- R Z Z.
    std::vector<GemmOp> both;
    if (!apply) both.push_back(builder.Symmetric(r, z, t));
    if (!first) both.push_back(builder.Multiply(z, q, q_next));
    if (!both.empty()) phases.push_back(std::move(both));
    if (!apply) phases.push_back({builder.Symmetric(t, z, r)});
    if (first) {
      std::swap(q, z);
    } else {
      std::swap(q, q_next);
    }
    first = apply;
    if (!apply) continue;
    phases.push_back({builder.Apply(q)});
    if (!last) phases.push_back({builder.Gram(r)});
  }
  return phases;
}

}  // namespace

NewtonSchulzMethod ChooseForm(const NewtonSchulzRule& rule, std::int64_t rows, std::int64_t cols) {
  if (rule.method == NewtonSchulzMethod::kStandard || rows == cols || !IsGramSafe(rule.steps)) {
    return NewtonSchulzMethod::kStandard;
  }
  if (rule.method == NewtonSchulzMethod::kGram) return NewtonSchulzMethod::kGram;
  const auto [m, n] = std::minmax(rows, cols);
  const bool pays =
      m >= kGramShortSide && static_cast<double>(n) >= kGramSidesRatio * static_cast<double>(m);
  return pays ? NewtonSchulzMethod::kGram : NewtonSchulzMethod::kStandard;
}

int SquareCount(NewtonSchulzMethod form) { return form == NewtonSchulzMethod::kGram ? 5 : 2; }

std::vector<std::vector<GemmOp>> NewtonSchulzPhases(std::span<const NewtonSchulzStep> steps,
                                                    NewtonSchulzMethod form, std::int64_t rows,
                                                    std::int64_t cols,
                                                    const ProgramBuffers& buffers) {
  const bool gram = form == NewtonSchulzMethod::kGram;
  const auto count = static_cast<int>(steps.size());
  const int applications = !gram ? count : (steps.size() > kGramRestart ? 2 : 1);
  Builder builder(rows, cols, buffers, applications);
  return gram ? Gram(steps, builder, buffers) : Standard(steps, builder, buffers);
}

}  // namespace muond::kernels::cuda
