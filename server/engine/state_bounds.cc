#include "server/engine/state_bounds.h"

#include <cmath>
#include <limits>

namespace muond {
namespace {

// A hair below FLT_MAX: the kernels round a handful of times on the way to a new state element.
constexpr double kLargest = static_cast<double>(std::numeric_limits<float>::max()) * (1 - 1e-5);

bool Fits(double bound) { return bound <= kLargest; }  // false for NaN too

double WeightOfGradient(const kernels::MomentumRule& rule) {
  return rule.form == kernels::MomentumForm::kSum ? 1.0 : 1.0 - rule.beta;
}

// What rounding can make of a bound on |M|. A bf16 M that fits so is finite: half of its last place
// below the largest finite one is what the factor leaves.
double Kept(double bound, const kernels::MomentumRule& rule) {
  return rule.m_dtype == kernels::Dtype::kBF16 ? bound * (1 + 0x1p-8) : bound;
}

}  // namespace

double MuonInputBound(const StateMaxima& now, double gradient_max,
                      const kernels::MomentumRule& rule) {
  const double gradient = WeightOfGradient(rule) * gradient_max * std::abs(rule.gradient_scale);
  const double momentum = Kept(rule.beta * now.momentum + gradient, rule);
  return rule.nesterov ? rule.beta * momentum + gradient : momentum;
}

bool MuonStateCouldOverflow(const StateMaxima& now, double gradient_max,
                            const kernels::MomentumRule& rule, double decay, double update_max) {
  const bool sum = rule.form == kernels::MomentumForm::kSum;
  const double momentum =
      Kept(rule.beta * now.momentum + WeightOfGradient(rule) * gradient_max, rule);
  // U feeds Newton-Schulz: not state, but an infinite one would leave no update to apply.
  const double u = MuonInputBound(now, gradient_max, rule);
  // The ema form is computed as M + (1 - beta)(G - M): the difference must fit as well.
  const double difference = sum ? 0.0 : gradient_max + now.momentum;
  const double weight = std::abs(decay) * now.weight + update_max;
  return !(Fits(momentum) && Fits(u) && Fits(difference) && Fits(weight));
}

bool AdamWStateCouldOverflow(const StateMaxima& now, double gradient_max,
                             const kernels::AdamWRule& rule) {
  const double m = rule.beta1 * now.momentum + (1 - rule.beta1) * gradient_max;
  const double v = rule.beta2 * now.exp_avg_sq + (1 - rule.beta2) * gradient_max * gradient_max;
  const double t = static_cast<double>(rule.t);
  const double m_hat = m / (1 - std::pow(rule.beta1, t));
  const double update = rule.lr * m_hat / rule.eps;
  const double weight = std::abs(rule.decay) * now.weight + update;
  return !(Fits(gradient_max + now.momentum) && Fits(v) && Fits(m_hat / rule.eps) && Fits(weight));
}

}  // namespace muond
