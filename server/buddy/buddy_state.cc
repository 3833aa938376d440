#include "server/buddy/buddy_state.h"

#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/convert.h"

namespace muond {

std::vector<TensorRef> TensorsOf(StateCopies& copies) {
  std::vector<TensorRef> tensors;
  for (std::size_t device = 0; device < copies.size(); ++device) {
    for (StateCopy::Shard& shard : copies[device].shards) {
      for (StateCopy::Tensor& tensor : shard.tensors) {
        TensorRef ref{.head = {}, .data = tensor.data, .bytes = tensor.bytes};
        ref.head.set_device(static_cast<std::int64_t>(device));
        ref.head.set_parameter(shard.parameter);
        ref.head.set_first(shard.first);
        ref.head.set_elements(shard.elements);
        ref.head.set_t(shard.t);
        ref.head.set_name(tensor.name);
        ref.head.set_dtype(ToProto(tensor.dtype));
        tensors.push_back(std::move(ref));
      }
    }
  }
  return tensors;
}

absl::StatusOr<std::vector<TensorRef>> MatchTensors(
    const google::protobuf::RepeatedPtrField<v1::BuddyTensor>& sent, StateCopies& copies) {
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::string>;
  struct Place {
    StateCopy::Shard* shard = nullptr;
    const StateCopy::Tensor* tensor = nullptr;
  };
  std::map<Key, Place> places;
  for (StateCopy& copy : copies) {
    for (StateCopy::Shard& shard : copy.shards) {
      for (const StateCopy::Tensor& tensor : shard.tensors) {
        places[{shard.parameter, shard.first, shard.elements, tensor.name}] = {&shard, &tensor};
      }
    }
  }
  std::vector<TensorRef> matched;
  for (const v1::BuddyTensor& head : sent) {
    auto place =
        places.extract({head.parameter(), head.first(), head.elements(), head.name()});
    if (place.empty()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("buddy: tensor \"%s\" of parameter %d, %d elements from %d: none of this "
                          "daemon's, or sent twice",
                          head.name(), head.parameter(), head.elements(), head.first()));
    }
    const StateCopy::Tensor& tensor = *place.mapped().tensor;
    if (head.dtype() != ToProto(tensor.dtype)) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "buddy: tensor \"%s\" of parameter %d: %s was sent, this daemon keeps it in %s",
          head.name(), head.parameter(), v1::Dtype_Name(head.dtype()),
          v1::Dtype_Name(ToProto(tensor.dtype))));
    }
    place.mapped().shard->t = head.t();
    matched.push_back({.head = head, .data = tensor.data, .bytes = tensor.bytes});
  }
  if (places.empty()) return matched;
  const auto& [parameter, first, elements, name] = places.begin()->first;
  return absl::FailedPreconditionError(
      absl::StrFormat("buddy: tensor \"%s\" of parameter %d, %d elements from %d, was not sent",
                      name, parameter, elements, first));
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
