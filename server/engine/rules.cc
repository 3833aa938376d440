#include "server/engine/rules.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "kernels/coefficients.h"
#include "proto/check.h"

namespace muond {
namespace {

absl::Status GroupError(const GroupSpec& group, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrFormat("group \"%s\": %s", group.name, what));
}

absl::StatusOr<std::vector<kernels::NewtonSchulzStep>> CustomSteps(const GroupSpec& group) {
  const auto& numbers = group.custom_steps;
  if (numbers.empty() || numbers.size() % 3 != 0) {
    return GroupError(
        group,
        absl::StrFormat("custom_steps: expected a, b, c per step, got %d numbers", numbers.size()));
  }
  std::vector<kernels::NewtonSchulzStep> steps;
  for (std::size_t i = 0; i < numbers.size(); i += 3) {
    if (!std::isfinite(numbers[i]) || !std::isfinite(numbers[i + 1]) ||
        !std::isfinite(numbers[i + 2])) {
      return GroupError(group, absl::StrFormat("custom_steps: step %d is not finite", i / 3));
    }
    steps.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
  }
  return steps;
}

// How far a custom list can carry a singular value from 1 sets the limit of what is plausible. A
// list that carries any of [0, 1] beyond kSingularValueMax orthogonalizes nothing and is refused.
absl::StatusOr<double> CustomResidualMax(const GroupSpec& group,
                                         const std::vector<kernels::NewtonSchulzStep>& steps) {
  constexpr double kSingularValueMax = 4;
  constexpr int kSamples = 20000;
  double largest = 1;
  for (int i = 0; i <= kSamples; ++i) {
    // Half of the samples are spread over the magnitudes down to 1e-10: steep lists peak there.
    for (double s : {i / double{kSamples}, std::pow(10.0, -10.0 * i / kSamples)}) {
      const double image = std::abs(kernels::EvaluateSteps(steps, s));
      if (!(image <= kSingularValueMax)) {
        return GroupError(group, absl::StrFormat("custom_steps: carry the singular value %g to %g; "
                                                 "at most %g is accepted",
                                                 s, image, kSingularValueMax));
      }
      largest = std::max(largest, image);
    }
  }
  return std::max(1.05, 1.05 * (largest * largest - 1));
}

absl::StatusOr<kernels::NewtonSchulzMethod> MethodOf(const GroupSpec& group) {
  if (group.ns_method.empty() || group.ns_method == "auto") {
    return kernels::NewtonSchulzMethod::kAuto;
  }
  if (group.ns_method == "standard") return kernels::NewtonSchulzMethod::kStandard;
  if (group.ns_method == "gram") return kernels::NewtonSchulzMethod::kGram;
  return GroupError(group, absl::StrFormat("ns_method: expected auto, standard or gram, got \"%s\"",
                                           group.ns_method));
}

absl::Status CheckNumbers(const GroupSpec& group) {
  if (!std::isfinite(group.norm_floor) || group.norm_floor < 0) {
    return GroupError(group, absl::StrFormat("norm_floor: expected a finite number >= 0, got %g",
                                             group.norm_floor));
  }
  if (!std::isfinite(group.extra_factor) || group.extra_factor <= 0) {
    return GroupError(group, absl::StrFormat("extra_factor: expected a finite number > 0, got %g",
                                             group.extra_factor));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<kernels::NewtonSchulzRule> NewtonSchulzRuleOf(const GroupSpec& group) {
  MUOND_RETURN_IF_ERROR(CheckNumbers(group));
  kernels::NewtonSchulzRule rule;
  rule.norm_floor = group.norm_floor;
  MUOND_ASSIGN_OR_RETURN(rule.method, MethodOf(group));
  const std::string name = group.coefficients.empty() ? "simple" : group.coefficients;
  bool gram_safe = false;
  if (name == "custom") {
    MUOND_ASSIGN_OR_RETURN(rule.steps, CustomSteps(group));
    MUOND_ASSIGN_OR_RETURN(rule.residual_max, CustomResidualMax(group, rule.steps));
  } else {
    const kernels::CoefficientSet* set = kernels::FindCoefficientSet(name);
    if (set == nullptr) {
      std::string known;
      for (const auto& candidate : kernels::CoefficientSets()) {
        known += std::string(candidate.name) + ", ";
      }
      return GroupError(group, absl::StrFormat("coefficients: expected one of %scustom, got \"%s\"",
                                               known, name));
    }
    rule.steps = set->steps;
    rule.residual_max = set->residual_max;
    gram_safe = set->gram_safe;
  }
  const auto length = static_cast<std::int64_t>(rule.steps.size());
  if (group.ns_steps != 0 && group.ns_steps != length) {
    return GroupError(group, absl::StrFormat("ns_steps: coefficient set \"%s\" is a schedule of %d "
                                             "steps, got %d",
                                             name, length, group.ns_steps));
  }
  if (rule.method == kernels::NewtonSchulzMethod::kGram && !gram_safe) {
    return GroupError(group, absl::StrFormat("ns_method: coefficient set \"%s\" is not known to be "
                                             "stable in Gram form; use standard or auto",
                                             name));
  }
  // What nobody has shown to be stable in Gram form never takes it.
  if (!gram_safe) rule.method = kernels::NewtonSchulzMethod::kStandard;
  return rule;
}

kernels::MomentumRule MomentumRuleOf(const GroupSpec& group, const Hyperparameters& now,
                                     double gradient_scale) {
  return {
      .form = group.momentum_sum_form ? kernels::MomentumForm::kSum : kernels::MomentumForm::kEma,
      .beta = now.momentum,
      .nesterov = group.nesterov,
      .gradient_scale = gradient_scale,
      .m_dtype = group.momentum_dtype};
}

double DecayFactor(const GroupSpec& group, const Hyperparameters& now) {
  const bool independent = group.weight_decay_form == WeightDecayForm::kIndependent;
  return 1.0 - (independent ? 1.0 : now.lr) * now.weight_decay;
}

}  // namespace muond
