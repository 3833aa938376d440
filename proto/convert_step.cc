// Conversions of a step's beginning and end, and the checks of numbers that all conversions share.
#include <cmath>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/convert_internal.h"

namespace muond {

namespace internal {

absl::Status CheckNotNegative(const char* field, double value) {
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: expected a finite number >= 0, got %g", field, value));
}

absl::Status CheckNotNegative(const char* field, std::int64_t value) {
  if (value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: expected >= 0, got %d", field, value));
}

absl::StatusOr<Hyperparameters> HyperparametersFromProto(const std::string& group,
                                                         Algorithm algorithm,
                                                         const v1::Hyperparameters& message) {
  const bool muon = algorithm == Algorithm::kMuon;
  Hyperparameters value = muon ? GroupSpec{}.muon : GroupSpec{}.adamw;
  value.lr = message.lr();
  value.weight_decay = message.weight_decay();
  if (muon) {
    value.momentum = message.momentum();
  } else {
    value.beta1 = message.beta1();
    value.beta2 = message.beta2();
    value.eps = message.eps();
  }
  const absl::Status status = ValidateHyperparameters(group, value);
  if (!status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(status.message(), muon ? " (of muon)" : " (of adamw)"));
  }
  return value;
}

}  // namespace internal

using internal::CastEnum;

static_assert(static_cast<int>(SkipCause::kTrainer) == v1::SkipCause_MAX);

namespace {

absl::Status HalfFromProto(Algorithm algorithm,
                           const google::protobuf::Map<std::string, v1::Hyperparameters>& message,
                           std::map<std::string, Hyperparameters>* value) {
  for (const auto& [group, hyperparameters] : message) {
    MUOND_RETURN_IF_ERROR(ValidateName("group", group));
    MUOND_ASSIGN_OR_RETURN((*value)[group],
                           internal::HyperparametersFromProto(group, algorithm, hyperparameters));
  }
  return absl::OkStatus();
}

}  // namespace

v1::Hyperparameters ToProto(const Hyperparameters& value) {
  v1::Hyperparameters message;
  message.set_lr(value.lr);
  message.set_weight_decay(value.weight_decay);
  message.set_momentum(value.momentum);
  message.set_beta1(value.beta1);
  message.set_beta2(value.beta2);
  message.set_eps(value.eps);
  return message;
}

absl::StatusOr<StepBegin> FromProto(const v1::BeginRequest& message) {
  MUOND_RETURN_IF_ERROR(internal::CheckNotNegative("step", message.step()));
  MUOND_RETURN_IF_ERROR(internal::CheckNotNegative("loss_scale", message.loss_scale()));
  MUOND_RETURN_IF_ERROR(internal::CheckNotNegative("micro_batches", message.micro_batches()));
  StepBegin value;
  value.step = message.step();
  if (message.loss_scale() != 0) value.loss_scale = message.loss_scale();
  if (message.micro_batches() != 0) value.micro_batches = message.micro_batches();
  MUOND_RETURN_IF_ERROR(HalfFromProto(Algorithm::kMuon, message.muon(), &value.muon));
  MUOND_RETURN_IF_ERROR(HalfFromProto(Algorithm::kAdamW, message.adamw(), &value.adamw));
  return value;
}

void ToProto(const StepBegin& value, v1::BeginRequest* message) {
  message->set_step(value.step);
  message->set_loss_scale(value.loss_scale);
  message->set_micro_batches(value.micro_batches);
  message->clear_muon();
  message->clear_adamw();
  for (const auto& [group, hyperparameters] : value.muon) {
    (*message->mutable_muon())[group] = ToProto(hyperparameters);
  }
  for (const auto& [group, hyperparameters] : value.adamw) {
    (*message->mutable_adamw())[group] = ToProto(hyperparameters);
  }
}

absl::StatusOr<SkipCause> FromProto(v1::SkipCause cause) {
  return CastEnum<SkipCause>("cause", cause, v1::SkipCause_IsValid(cause));
}

v1::SkipCause ToProto(SkipCause cause) { return static_cast<v1::SkipCause>(cause); }

StepOutcome FromProto(const v1::StepOutcome& message) {
  StepOutcome value;
  value.step = message.step();
  value.applied = message.applied();
  // A cause that only a newer peer knows comes out as none: `applied` still tells the truth.
  value.cause = FromProto(message.cause()).value_or(SkipCause::kNone);
  value.loss_scale = message.loss_scale();
  value.next_loss_scale = message.next_loss_scale();
  value.grad_norm = message.grad_norm();
  value.clip_coefficient = message.clip_coefficient();
  value.applied_steps = message.applied_steps();
  value.skipped_steps = message.skipped_steps();
  value.consecutive_skips = message.consecutive_skips();
  value.newton_schulz_calls = message.newton_schulz_calls();
  value.newton_schulz_fallbacks = message.newton_schulz_fallbacks();
  value.zero_inputs = message.zero_inputs();
  value.nonfinite_elements = message.nonfinite_elements();
  value.version = message.version();
  value.offenders.assign(message.offenders().begin(), message.offenders().end());
  return value;
}

v1::StepOutcome ToProto(const StepOutcome& value) {
  v1::StepOutcome message;
  message.set_step(value.step);
  message.set_applied(value.applied);
  message.set_cause(ToProto(value.cause));
  message.set_loss_scale(value.loss_scale);
  message.set_next_loss_scale(value.next_loss_scale);
  message.set_grad_norm(value.grad_norm);
  message.set_clip_coefficient(value.clip_coefficient);
  message.set_applied_steps(value.applied_steps);
  message.set_skipped_steps(value.skipped_steps);
  message.set_consecutive_skips(value.consecutive_skips);
  message.set_newton_schulz_calls(value.newton_schulz_calls);
  message.set_newton_schulz_fallbacks(value.newton_schulz_fallbacks);
  message.set_zero_inputs(value.zero_inputs);
  message.set_nonfinite_elements(value.nonfinite_elements);
  message.set_version(value.version);
  for (const std::string& name : value.offenders) message.add_offenders(name);
  return message;
}

}  // namespace muond
