// Conversions of a run and of what holds for its life: groups, rules, loss scale.
#include <cmath>
#include <string>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/convert_internal.h"

namespace muond {

using internal::About;
using internal::CastEnum;
using internal::CheckNotNegative;

static_assert(static_cast<int>(ShapeFactor::kNone) == v1::Group::ShapeFactor_MAX);
static_assert(static_cast<int>(WeightDecayForm::kIndependent) == v1::Group::WeightDecayForm_MAX);
static_assert(static_cast<int>(LossScaleMode::kExternal) == v1::LossScale::Mode_MAX);
static_assert(static_cast<int>(LossScalePolicy::kMegatron) == v1::LossScale::Policy_MAX);
static_assert(static_cast<int>(ClipPolicy::kAll) == v1::Run::ClipPolicy_MAX);
static_assert(v1::Run::Reduction_MAX == v1::Run::REDUCTION_SUM);

namespace {

// Above the longest published list (10) with room to try things; a message can't make the service
// iterate for hours.
constexpr int kCustomStepsMax = 64;

absl::Status FillNewtonSchulz(const v1::Group& message, GroupSpec* value) {
  if (!message.coefficients().empty()) value->coefficients = message.coefficients();
  MUOND_RETURN_IF_ERROR(ValidateName("coefficient set", value->coefficients));
  const int numbers = message.custom_steps_size();
  if ((value->coefficients == "custom") != (numbers > 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "coefficients \"%s\" conflicts with %d custom_steps: they go with \"custom\" only",
        value->coefficients, numbers));
  }
  if (numbers % 3 != 0 || numbers > 3 * kCustomStepsMax) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "custom_steps: expected a, b, c for each of at most %d steps, got %d numbers",
        kCustomStepsMax, numbers));
  }
  for (const double coefficient : message.custom_steps()) {
    if (!std::isfinite(coefficient)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("custom_steps: expected finite numbers, got %g", coefficient));
    }
  }
  value->custom_steps.assign(message.custom_steps().begin(), message.custom_steps().end());
  MUOND_RETURN_IF_ERROR(CheckNotNegative("ns_steps", message.ns_steps()));
  value->ns_steps = message.ns_steps();
  if (!message.ns_method().empty()) value->ns_method = message.ns_method();
  if (value->ns_method != "auto" && value->ns_method != "standard" && value->ns_method != "gram") {
    return absl::InvalidArgumentError(
        "ns_method: unknown value: expected \"auto\", \"standard\" or \"gram\"");
  }
  MUOND_RETURN_IF_ERROR(CheckNotNegative("norm_floor", message.norm_floor()));
  value->norm_floor = message.norm_floor();
  return absl::OkStatus();
}

// A dtype that momentum is not kept in is refused, never replaced by one that it is.
absl::Status FillMomentumDtype(const v1::Group& message, GroupSpec* value) {
  if (message.momentum_dtype() == v1::DTYPE_UNSPECIFIED) return absl::OkStatus();
  if (message.momentum_dtype() != v1::DTYPE_F32 && message.momentum_dtype() != v1::DTYPE_BF16) {
    return absl::InvalidArgumentError(
        absl::StrFormat("momentum_dtype: expected F32 or BF16, got %s",
                        v1::Dtype_IsValid(message.momentum_dtype())
                            ? "F16: its range is too small for a momentum"
                            : std::to_string(message.momentum_dtype())));
  }
  MUOND_ASSIGN_OR_RETURN(value->momentum_dtype, FromProto(message.momentum_dtype()));
  if (value->algorithm != Algorithm::kAdamW || value->momentum_dtype == Dtype::kF32) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "momentum_dtype: BF16 is Muon's, and the group is AdamW's: its moments are kept in F32");
}

absl::Status FillGroup(const v1::Group& message, GroupSpec* value) {
  MUOND_ASSIGN_OR_RETURN(value->algorithm, FromProto(message.algorithm()));
  MUOND_RETURN_IF_ERROR(FillMomentumDtype(message, value));
  value->nesterov = !message.plain_momentum();
  value->momentum_sum_form = message.momentum_sum_form();
  MUOND_RETURN_IF_ERROR(FillNewtonSchulz(message, value));
  MUOND_ASSIGN_OR_RETURN(
      value->shape_factor,
      CastEnum<ShapeFactor>("shape_factor", message.shape_factor(),
                            v1::Group::ShapeFactor_IsValid(message.shape_factor())));
  MUOND_RETURN_IF_ERROR(CheckNotNegative("extra_factor", message.extra_factor()));
  if (message.extra_factor() != 0) value->extra_factor = message.extra_factor();
  MUOND_ASSIGN_OR_RETURN(
      value->weight_decay_form,
      CastEnum<WeightDecayForm>("weight_decay_form", message.weight_decay_form(),
                                v1::Group::WeightDecayForm_IsValid(message.weight_decay_form())));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GroupSpec> FromProto(const v1::Group& message) {
  MUOND_RETURN_IF_ERROR(ValidateName("group", message.name()));
  GroupSpec value;
  value.name = message.name();
  if (message.has_muon()) {
    MUOND_ASSIGN_OR_RETURN(value.muon, internal::HyperparametersFromProto(
                                           value.name, Algorithm::kMuon, message.muon()));
  }
  if (message.has_adamw()) {
    MUOND_ASSIGN_OR_RETURN(value.adamw, internal::HyperparametersFromProto(
                                            value.name, Algorithm::kAdamW, message.adamw()));
  }
  const absl::Status status = FillGroup(message, &value);
  if (!status.ok()) return About(absl::StrFormat("group \"%s\"", value.name), status);
  return value;
}

v1::Group ToProto(const GroupSpec& value) {
  v1::Group message;
  message.set_name(value.name);
  message.set_algorithm(ToProto(value.algorithm));
  *message.mutable_muon() = ToProto(value.muon);
  *message.mutable_adamw() = ToProto(value.adamw);
  message.set_plain_momentum(!value.nesterov);
  message.set_momentum_sum_form(value.momentum_sum_form);
  message.set_momentum_dtype(ToProto(value.momentum_dtype));
  message.set_coefficients(value.coefficients);
  message.mutable_custom_steps()->Add(value.custom_steps.begin(), value.custom_steps.end());
  message.set_ns_steps(value.ns_steps);
  message.set_ns_method(value.ns_method);
  message.set_norm_floor(value.norm_floor);
  message.set_shape_factor(static_cast<v1::Group::ShapeFactor>(value.shape_factor));
  message.set_extra_factor(value.extra_factor);
  message.set_weight_decay_form(static_cast<v1::Group::WeightDecayForm>(value.weight_decay_form));
  return message;
}

namespace {

absl::StatusOr<RoutingRule> RuleFromProto(const v1::RoutingRule& message) {
  constexpr std::size_t kPatternBytesMax = 1024;
  if (message.pattern().empty() || message.pattern().size() > kPatternBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("routing rule: pattern: expected 1 to %d bytes, got %d", kPatternBytesMax,
                        message.pattern().size()));
  }
  absl::StatusOr<Algorithm> algorithm = FromProto(message.algorithm());
  if (!algorithm.ok()) return About("routing rule", algorithm.status());
  return RoutingRule{message.pattern(), *algorithm};
}

// The factors' ranges are those of torch.amp.GradScaler.
absl::Status CheckLossScale(const LossScaleSpec& value) {
  if (!(std::isfinite(value.initial) && value.initial > 0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("initial: expected a finite number > 0, got %g", value.initial));
  }
  if (!(std::isfinite(value.growth_factor) && value.growth_factor > 1)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "growth_factor: expected a finite number > 1, got %g", value.growth_factor));
  }
  if (!(value.backoff_factor > 0 && value.backoff_factor < 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("backoff_factor: expected 0 < value < 1, got %g", value.backoff_factor));
  }
  MUOND_RETURN_IF_ERROR(CheckNotNegative("window", value.window));
  MUOND_RETURN_IF_ERROR(CheckNotNegative("hysteresis", value.hysteresis));
  MUOND_RETURN_IF_ERROR(CheckNotNegative("minimum", value.minimum));
  MUOND_RETURN_IF_ERROR(CheckNotNegative("error_after", value.error_after));
  if (value.mode == LossScaleMode::kDynamic && value.minimum > value.initial) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "minimum %g conflicts with initial %g: it is larger", value.minimum, value.initial));
  }
  return absl::OkStatus();
}

absl::StatusOr<LossScaleSpec> LossScaleFromProto(const v1::LossScale& message) {
  LossScaleSpec value;
  MUOND_ASSIGN_OR_RETURN(
      value.mode,
      CastEnum<LossScaleMode>("mode", message.mode(), v1::LossScale::Mode_IsValid(message.mode())));
  MUOND_ASSIGN_OR_RETURN(
      value.policy, CastEnum<LossScalePolicy>("policy", message.policy(),
                                              v1::LossScale::Policy_IsValid(message.policy())));
  if (message.initial() != 0) value.initial = message.initial();
  if (message.growth_factor() != 0) value.growth_factor = message.growth_factor();
  if (message.backoff_factor() != 0) value.backoff_factor = message.backoff_factor();
  value.window = message.window();
  value.hysteresis = message.hysteresis();
  value.minimum = message.minimum();
  value.error_after = message.error_after();
  MUOND_RETURN_IF_ERROR(CheckLossScale(value));
  return value;
}

v1::LossScale LossScaleToProto(const LossScaleSpec& value) {
  v1::LossScale message;
  message.set_mode(static_cast<v1::LossScale::Mode>(value.mode));
  message.set_policy(static_cast<v1::LossScale::Policy>(value.policy));
  message.set_initial(value.initial);
  message.set_growth_factor(value.growth_factor);
  message.set_backoff_factor(value.backoff_factor);
  message.set_window(value.window);
  message.set_hysteresis(value.hysteresis);
  message.set_minimum(value.minimum);
  message.set_error_after(value.error_after);
  return message;
}

absl::StatusOr<Reduction> ReductionFromProto(const char* field, v1::Run::Reduction reduction,
                                             Reduction missing) {
  switch (reduction) {
    case v1::Run::REDUCTION_UNSPECIFIED:
      return missing;
    case v1::Run::REDUCTION_MEAN:
      return Reduction::kMean;
    case v1::Run::REDUCTION_SUM:
      return Reduction::kSum;
    default:
      return CastEnum<Reduction>(field, reduction, false);
  }
}

v1::Run::Reduction ReductionToProto(Reduction value) {
  return value == Reduction::kMean ? v1::Run::REDUCTION_MEAN : v1::Run::REDUCTION_SUM;
}

absl::Status FillAdditions(const v1::Run& message, RunSpec* value) {
  std::int64_t least = 1;
  for (const std::int64_t first : message.additions()) {
    if (first < least || first >= message.parameters_size()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "additions: expected ascending numbers from 1 to below the %d parameters, got %d",
          message.parameters_size(), first));
    }
    least = first + 1;
  }
  value->additions.assign(message.additions().begin(), message.additions().end());
  return absl::OkStatus();
}

absl::Status FillRun(const v1::Run& message, RunSpec* value) {
  if (message.world_size() < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "world_size: expected at least 1 trainer rank, got %d", message.world_size()));
  }
  value->world_size = message.world_size();
  value->parameters.reserve(message.parameters_size());
  for (const v1::Parameter& parameter : message.parameters()) {
    MUOND_ASSIGN_OR_RETURN(value->parameters.emplace_back(), FromProto(parameter));
  }
  MUOND_RETURN_IF_ERROR(FillAdditions(message, value));
  for (const v1::Group& group : message.groups()) {
    MUOND_ASSIGN_OR_RETURN(value->groups.emplace_back(), FromProto(group));
  }
  for (const v1::RoutingRule& rule : message.rules()) {
    MUOND_ASSIGN_OR_RETURN(value->rules.emplace_back(), RuleFromProto(rule));
  }
  absl::StatusOr<LossScaleSpec> loss_scale = LossScaleFromProto(message.loss_scale());
  if (!loss_scale.ok()) return About("loss_scale", loss_scale.status());
  value->loss_scale = *loss_scale;
  MUOND_RETURN_IF_ERROR(CheckNotNegative("max_grad_norm", message.max_grad_norm()));
  value->max_grad_norm = message.max_grad_norm();
  MUOND_ASSIGN_OR_RETURN(value->clip_policy,
                         CastEnum<ClipPolicy>("clip_policy", message.clip_policy(),
                                              v1::Run::ClipPolicy_IsValid(message.clip_policy())));
  MUOND_RETURN_IF_ERROR(
      CheckNotNegative("grad_norm_skip_threshold", message.grad_norm_skip_threshold()));
  value->grad_norm_skip_threshold = message.grad_norm_skip_threshold();
  MUOND_ASSIGN_OR_RETURN(
      value->reduce_ranks,
      ReductionFromProto("reduce_ranks", message.reduce_ranks(), Reduction::kMean));
  MUOND_ASSIGN_OR_RETURN(
      value->reduce_micro_batches,
      ReductionFromProto("reduce_micro_batches", message.reduce_micro_batches(), Reduction::kSum));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RunSpec> FromProto(const v1::Run& message) {
  MUOND_RETURN_IF_ERROR(ValidateName("run", message.name()));
  RunSpec value;
  value.name = message.name();
  const absl::Status status = FillRun(message, &value);
  if (!status.ok()) return About(absl::StrFormat("run \"%s\"", value.name), status);
  return value;
}

v1::Run ToProto(const RunSpec& value) {
  v1::Run message;
  message.set_name(value.name);
  message.set_world_size(value.world_size);
  for (const ParameterSpec& parameter : value.parameters) {
    *message.add_parameters() = ToProto(parameter);
  }
  for (const GroupSpec& group : value.groups) *message.add_groups() = ToProto(group);
  for (const RoutingRule& rule : value.rules) {
    v1::RoutingRule* added = message.add_rules();
    added->set_pattern(rule.pattern);
    added->set_algorithm(ToProto(rule.algorithm));
  }
  *message.mutable_loss_scale() = LossScaleToProto(value.loss_scale);
  message.set_max_grad_norm(value.max_grad_norm);
  message.set_clip_policy(static_cast<v1::Run::ClipPolicy>(value.clip_policy));
  message.set_grad_norm_skip_threshold(value.grad_norm_skip_threshold);
  message.set_reduce_ranks(ReductionToProto(value.reduce_ranks));
  message.set_reduce_micro_batches(ReductionToProto(value.reduce_micro_batches));
  message.mutable_additions()->Add(value.additions.begin(), value.additions.end());
  return message;
}

}  // namespace muond
