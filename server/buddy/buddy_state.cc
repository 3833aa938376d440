#include "server/buddy/buddy_state.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/convert.h"

namespace muond {

std::vector<TensorRef> TensorsOf(StateCopies& copies) {
  std::vector<TensorRef> tensors;
  for (std::size_t device = 0; device < copies.size(); ++device) {
    for (StateCopy::Shard& shard : copies[device].shards) {
      for (StateCopy::Tensor& tensor : shard.tensors) {
        TensorRef ref{.head = {}, .data = tensor.data};
        ref.head.set_device(static_cast<std::int64_t>(device));
        ref.head.set_parameter(shard.parameter);
        ref.head.set_first(shard.first);
        ref.head.set_elements(shard.elements);
        ref.head.set_t(shard.t);
        ref.head.set_name(tensor.name);
        tensors.push_back(std::move(ref));
      }
    }
  }
  return tensors;
}

absl::Status TakeHeads(const google::protobuf::RepeatedPtrField<v1::BuddyTensor>& tensors,
                       StateCopies& copies) {
  int next = 0;
  for (std::size_t device = 0; device < copies.size(); ++device) {
    for (StateCopy::Shard& shard : copies[device].shards) {
      for (const StateCopy::Tensor& tensor : shard.tensors) {
        const v1::BuddyTensor head = next < tensors.size() ? tensors[next] : v1::BuddyTensor();
        ++next;
        const bool alike = head.device() == static_cast<std::int64_t>(device) &&
                           head.parameter() == shard.parameter && head.first() == shard.first &&
                           head.elements() == shard.elements && head.name() == tensor.name;
        if (!alike) {
          return absl::FailedPreconditionError(absl::StrFormat(
              "buddy: tensor %d is \"%s\" of parameter %d, expected \"%s\" of %d", next - 1,
              head.name(), head.parameter(), tensor.name, shard.parameter));
        }
        shard.t = head.t();
      }
    }
  }
  if (next == tensors.size()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("buddy: %d tensors, expected %d", tensors.size(), next));
}

v1::BuddyControl ToProto(const StepMemory& memory) {
  v1::BuddyControl control;
  control.set_scale(memory.scaler.scale);
  control.set_good_steps(memory.scaler.good_steps);
  control.set_hysteresis_left(memory.scaler.hysteresis_left);
  control.set_overflows_at_minimum(memory.scaler.overflows_at_minimum);
  control.set_applied_steps(memory.applied_steps);
  control.set_skipped_steps(memory.skipped_steps);
  control.set_consecutive_skips(memory.consecutive_skips);
  if (memory.last_outcome) *control.mutable_last_outcome() = ToProto(*memory.last_outcome);
  ToProto(memory.muon, *control.mutable_muon());
  ToProto(memory.adamw, *control.mutable_adamw());
  return control;
}

StepMemory FromProto(const v1::BuddyControl& control) {
  StepMemory memory{.scaler = {.scale = control.scale(),
                               .good_steps = control.good_steps(),
                               .hysteresis_left = control.hysteresis_left(),
                               .overflows_at_minimum = control.overflows_at_minimum()},
                    .muon = FromProto(control.muon()),
                    .adamw = FromProto(control.adamw()),
                    .applied_steps = control.applied_steps(),
                    .skipped_steps = control.skipped_steps(),
                    .consecutive_skips = control.consecutive_skips(),
                    .last_outcome = {}};
  if (control.has_last_outcome()) memory.last_outcome = FromProto(control.last_outcome());
  return memory;
}

void ToProto(const HyperparameterMap& values,
             google::protobuf::Map<std::string, v1::Hyperparameters>& messages) {
  for (const auto& [group, value] : values) messages[group] = ToProto(value);
}

HyperparameterMap FromProto(
    const google::protobuf::Map<std::string, v1::Hyperparameters>& messages) {
  HyperparameterMap values;
  for (const auto& [group, message] : messages) {
    values[group] = {.lr = message.lr(),
                     .weight_decay = message.weight_decay(),
                     .momentum = message.momentum(),
                     .beta1 = message.beta1(),
                     .beta2 = message.beta2(),
                     .eps = message.eps()};
  }
  return values;
}

}  // namespace muond
