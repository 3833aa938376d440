#include "server/step/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

constexpr double kInitial = 65536;
constexpr double kGrowthFactor = 2.0;
constexpr double kBackoffFactor = 0.5;
constexpr double kLargest = std::numeric_limits<float>::max();
constexpr double kSmallest = std::numeric_limits<float>::min();

// The service's only table of loss-scale defaults.
LossScaleSpec WithDefaults(LossScaleSpec spec) {
  const bool torch = spec.policy == LossScalePolicy::kTorch;
  if (spec.initial == 0) spec.initial = kInitial;
  if (spec.growth_factor == 0) spec.growth_factor = kGrowthFactor;
  if (spec.backoff_factor == 0) spec.backoff_factor = kBackoffFactor;
  if (spec.window == 0) spec.window = torch ? 2000 : 1000;
  if (spec.hysteresis == 0) spec.hysteresis = torch ? 1 : 2;
  if (spec.minimum == 0) spec.minimum = torch ? 0 : 1;
  return spec;
}

absl::Status Unless(bool ok, const char* field, double value, const char* wanted) {
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("loss scale: field \"%s\": expected %s, got %.17g", field, wanted, value));
}

bool WithinFloat(double value) { return value >= kSmallest && value <= kLargest; }

}  // namespace

LossScaler::LossScaler(const LossScaleSpec& spec) : spec_(WithDefaults(spec)) {
  state_.scale = spec_.mode == LossScaleMode::kNone ? 1.0 : spec_.initial;
  state_.hysteresis_left = spec_.hysteresis;
}

absl::Status LossScaler::CheckTold(double told) const {
  // Gradients are multiplied by its inverse in fp32.
  if (!WithinFloat(told)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("loss scale: expected a positive normal fp32 number, got %.17g", told));
  }
  if (spec_.mode == LossScaleMode::kExternal || told == state_.scale) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "loss scale: the run's is %.17g, gradients were made with %.17g", state_.scale, told));
}

ScaleChange LossScaler::OnStep(bool applied, SkipCause cause, double told) {
  switch (spec_.mode) {
    case LossScaleMode::kNone:
    case LossScaleMode::kStatic:
      return ScaleChange::kNone;
    case LossScaleMode::kExternal:
      state_.scale = told;
      return ScaleChange::kNone;
    case LossScaleMode::kDynamic:
      break;
  }
  if (applied) return OnGood();
  return cause == SkipCause::kOverflow ? OnOverflow() : ScaleChange::kNone;
}

ScaleChange LossScaler::OnGood() {
  state_.overflows_at_minimum = 0;
  ++state_.good_steps;
  if (spec_.policy == LossScalePolicy::kDeepSpeed) {
    // DeepSpeed compares step numbers, which puts its first growth one step later than the others',
    // and keeps counting from the last overflow.
    const std::int64_t stable = state_.good_steps - 1;
    if (stable <= 0 || stable % spec_.window != 0) return ScaleChange::kNone;
  } else {
    if (state_.good_steps < spec_.window) return ScaleChange::kNone;
    state_.good_steps = 0;
  }
  state_.hysteresis_left = spec_.hysteresis;
  const double grown = state_.scale * spec_.growth_factor;
  if (grown > kLargest) return ScaleChange::kNone;
  state_.scale = grown;
  return ScaleChange::kGrowth;
}

ScaleChange LossScaler::OnOverflow() {
  const double floor = Floor();
  state_.good_steps = 0;
  state_.overflows_at_minimum = state_.scale <= floor ? state_.overflows_at_minimum + 1 : 0;
  if (state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
    return ScaleChange::kNone;
  }
  const double lowered = std::max(state_.scale * spec_.backoff_factor, floor);
  if (lowered >= state_.scale) return ScaleChange::kNone;
  state_.scale = lowered;
  return ScaleChange::kBackoff;
}

absl::Status LossScaler::AtMinimum() const {
  if (spec_.mode != LossScaleMode::kDynamic || spec_.error_after == 0 ||
      state_.overflows_at_minimum < spec_.error_after) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "loss scale: %d overflows in a row at the minimum %.17g (error_after %d): the gradients are "
      "not finite at any scale that is allowed; all steps so far stand, no state is lost",
      state_.overflows_at_minimum, Floor(), spec_.error_after));
}

double LossScaler::Floor() const { return std::max(spec_.minimum, kSmallest); }

absl::Status ValidateLossScale(const LossScaleSpec& given) {
  constexpr char kCount[] = "0 (the default) or more";
  MUOND_RETURN_IF_ERROR(Unless(given.window >= 0, "window", given.window, kCount));
  MUOND_RETURN_IF_ERROR(Unless(given.hysteresis >= 0, "hysteresis", given.hysteresis, kCount));
  MUOND_RETURN_IF_ERROR(
      Unless(given.error_after >= 0, "error_after", given.error_after, "0 (never) or more"));
  const LossScaleSpec spec = WithDefaults(given);
  MUOND_RETURN_IF_ERROR(
      Unless(WithinFloat(spec.initial), "initial", spec.initial, "a positive normal fp32 number"));
  MUOND_RETURN_IF_ERROR(Unless(spec.growth_factor > 1 && std::isfinite(spec.growth_factor),
                               "growth_factor", spec.growth_factor, "a finite number above 1"));
  MUOND_RETURN_IF_ERROR(Unless(spec.backoff_factor > 0 && spec.backoff_factor < 1, "backoff_factor",
                               spec.backoff_factor, "a number between 0 and 1"));
  MUOND_RETURN_IF_ERROR(Unless(spec.minimum == 0 || WithinFloat(spec.minimum), "minimum",
                               spec.minimum, "0 (the default) or a positive normal fp32 number"));
  return Unless(spec.mode != LossScaleMode::kDynamic || spec.initial >= spec.minimum, "initial",
                spec.initial, "no less than \"minimum\"");
}

}  // namespace muond
