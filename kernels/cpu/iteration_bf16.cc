// Newton-Schulz with bf16 products: X in fp32 beside its rounded copy, polynomials in split form.
#include <algorithm>
#include <utility>

#include "kernels/cpu/bf16_tiles.h"
#include "kernels/cpu/iteration.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/products_bf16.h"

namespace muond::kernels::cpu {
namespace {

// Hands out pieces of scratch; with no scratch it only counts.
class Layout {
 public:
  explicit Layout(float* scratch) : scratch_(scratch) {}

  float* Floats(std::int64_t count) {
    float* piece = scratch_ == nullptr ? nullptr : scratch_ + used_;
    used_ += (static_cast<std::size_t>(count) + 15) / 16 * 16;
    return piece;
  }
  std::uint16_t* Halves(std::int64_t count) {
    return reinterpret_cast<std::uint16_t*>(Floats((count + 1) / 2));
  }
  std::size_t used() const { return used_; }

 private:
  float* scratch_;
  std::size_t used_ = 0;
};

struct Memory {
  Memory(Layout& layout, std::int64_t m, std::int64_t n)
      : x(layout.Floats(m * n)), vectors(layout.Floats(3 * m)) {
    for (std::uint16_t*& copy : rounded) copy = layout.Halves(m * n);
    for (SplitMatrix& square : squares) {
      square = {layout.Floats(m * m), layout.Halves(m * m), layout.Floats(m)};
    }
  }

  float* x;
  float* vectors;
  std::uint16_t* rounded[2];
  SplitMatrix squares[3];
};

class Iteration {
 public:
  Iteration(const IterationTools& tools, const MatrixJob& job, const Memory& memory)
      : tools_(tools),
        u_(static_cast<const float*>(job.u)),
        o_(static_cast<float*>(job.o)),
        transposed_(job.rows > job.cols),
        m_(std::min(job.rows, job.cols)),
        n_(std::max(job.rows, job.cols)),
        u_scale_(job.u_scale),
        memory_(memory),
        products_(tools.loop, m_, n_, memory.vectors) {}

  bool Run(const NewtonSchulzRule& rule, bool paired) {
    if (!Normalize(rule.norm_floor * u_scale_)) {
      std::fill_n(o_, m_ * n_, 0.0f);
      return false;
    }
    std::size_t step = 0;
    bool pair = paired;
    while (step < rule.steps.size()) {
      const std::size_t left = rule.steps.size() - step;
      const std::size_t count = pair && left >= 2 ? 2 : 1;
      Advance(std::span(rule.steps).subspan(step, count), count == left);
      step += count;
      pair = paired && !pair;
    }
    return true;
  }

 private:
  // The rounded X = U / max(|U|_F, floor) in the wide view. X's fp32 values stay U's until the
  // first product rewrites them.
  bool Normalize(double floor) {
    x_.x = u_;
    if (transposed_) {
      // Summed after transposing: a matrix and its transpose get the same bits.
      Transpose(tools_.loop, tools_.passes, u_, n_, m_, memory_.x);
      x_.x = memory_.x;
    }
    x_.x_scale = NormalizingFactor(Observe(tools_, x_.x, m_ * n_), floor);
    if (x_.x_scale == 0) return false;
    const auto elements = static_cast<std::size_t>(m_ * n_);
    tools_.loop.ForEach(BlockCount(elements), [&](std::size_t i) {
      const std::size_t begin = i * kBlockElements;
      ScaleToBF16(memory_.rounded[0] + begin, x_.x + begin, x_.x_scale,
                  static_cast<std::int64_t>(std::min(kBlockElements, elements - begin)));
    });
    x_.rounded = memory_.rounded[0];
    return true;
  }

  // One or two steps with one product with X. `last` writes O.
  void Advance(std::span<const NewtonSchulzStep> steps, bool last) {
    const auto& [a, b, c] = memory_.squares;
    const auto narrow = [](const NewtonSchulzStep& step) {
      return BF16Step{static_cast<float>(step.a), static_cast<float>(step.b),
                      static_cast<float>(step.c)};
    };
    products_.Gram(x_.rounded, a);
    products_.Step(a, narrow(steps[0]), steps.size() > 1, b);
    const SplitMatrix* q = &b;
    if (steps.size() > 1) {
      products_.Multiply(a, b, true, c);  // R Z
      products_.Multiply(c, b, true, a);  // the next R = R Z Z
      products_.Step(a, narrow(steps[1]), true, c);
      products_.Multiply(b, c, false, a);  // Z Z' = Q
      q = &a;
    }
    std::uint16_t* next =
        x_.rounded == memory_.rounded[0] ? memory_.rounded[1] : memory_.rounded[0];
    float* out = last || !transposed_ ? o_ : memory_.x;
    products_.MultiplyX(*q, x_, out, last && transposed_, last ? nullptr : next);
    x_ = {out, 1, next};
  }

  const IterationTools& tools_;
  const float* const u_;
  float* const o_;
  const bool transposed_;
  const std::int64_t m_, n_;
  const double u_scale_;
  const Memory& memory_;
  const BF16Products products_;
  RoundedMatrix x_;
};

}  // namespace

bool IterateBF16(const IterationTools& tools, const MatrixJob& job, const NewtonSchulzRule& rule,
                 bool paired, float* scratch) {
  Layout layout(scratch);
  const Memory memory(layout, std::min(job.rows, job.cols), std::max(job.rows, job.cols));
  return Iteration(tools, job, memory).Run(rule, paired);
}

std::size_t BF16ScratchFloats(std::int64_t m, std::int64_t n) {
  Layout layout(nullptr);
  const Memory memory(layout, m, n);
  return layout.used();
}

}  // namespace muond::kernels::cpu
