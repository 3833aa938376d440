// The loss scale as the service owns it: policies torch, deepspeed and megatron, and the modes that
// leave it to the trainer. Pure; the whole state is a value (it goes into checkpoints).
//
// Sources: torch.amp.GradScaler; DeepSpeed runtime/fp16/loss_scaler.py; Megatron-Core
// optimizer/grad_scaler.py. docs/semantics.md, "Loss scale", has the golden sequences.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "proto/values.h"

namespace muond {

struct LossScalerState {
  double scale = 1.0;
  // In a row, since the last overflow (or growth: torch, megatron). Other skips don't end the row.
  std::int64_t good_steps = 0;
  std::int64_t hysteresis_left = 1;       // 1: the next overflow lowers the scale
  std::int64_t overflows_at_minimum = 0;  // in a row
  friend bool operator==(const LossScalerState&, const LossScalerState&) = default;
};

enum class ScaleChange : std::uint8_t { kNone, kGrowth, kBackoff };

class LossScaler {
 public:
  // The spec must have passed ValidateLossScale; zeros stand for the policy's defaults.
  explicit LossScaler(const LossScaleSpec& spec);

  // The scale that the next step's gradients are to be made with. kExternal: the last one told.
  double scale() const { return state_.scale; }
  const LossScalerState& state() const { return state_; }
  void Restore(const LossScalerState& state) { state_ = state; }

  // INVALID_ARGUMENT unless `told` is what gradients of the next step may be scaled with: finite,
  // positive; equal to scale() in modes none (1), static and dynamic. kExternal takes any.
  absl::Status CheckTold(double told) const;

  // Accounts for a finished step. Only cause kOverflow moves a dynamic scale down; kStateOverflow,
  // kNormThreshold and kTrainer leave scale and counters alone. `told` is kept in mode kExternal.
  // A dynamic scale stays a normal fp32 number, since that is where trainers keep it: growth past
  // the largest and backoff below the smallest leave it where it is.
  ScaleChange OnStep(bool applied, SkipCause cause, double told);

  // FAILED_PRECONDITION once error_after overflows happened in a row at the minimum; OK else. An
  // overflow counts when its gradients were made with the minimum, hysteresis or not.
  absl::Status AtMinimum() const;

  // The floor of a dynamic scale, 0 where there is none (metric muond_loss_scale_min).
  double minimum() const { return spec_.mode == LossScaleMode::kDynamic ? spec_.minimum : 0; }

  // The spec with the policy's defaults filled in: the one table of defaults, for all who show it.
  const LossScaleSpec& spec() const { return spec_; }

 private:
  ScaleChange OnGood();
  ScaleChange OnOverflow();
  double Floor() const;

  LossScaleSpec spec_;
  LossScalerState state_;
};

// INVALID_ARGUMENT naming the field and the value unless the spec makes sense. Zeros are allowed
// where they stand for a default.
absl::Status ValidateLossScale(const LossScaleSpec& spec);

}  // namespace muond
