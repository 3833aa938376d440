// State, gradients and what goes with them as a buddy's messages, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "muond/v1/buddy.pb.h"
#include "server/engine/state_copy.h"
#include "server/step/step_machine.h"

namespace muond {

// All tensors of a copy in the order in which they are sent.
struct TensorRef {
  v1::BuddyTensor head;
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};
std::vector<TensorRef> TensorsOf(StateCopies& copies);
// The tensors of `copies`, in the order of those that were sent, whose t they take over. The owner
// may have had its shards on other engines: before it died parameters were added one after the
// other. FAILED_PRECONDITION unless all of `copies` were sent, in their dtypes, and nothing else.
absl::StatusOr<std::vector<TensorRef>> MatchTensors(
    const google::protobuf::RepeatedPtrField<v1::BuddyTensor>& sent, StateCopies& copies);

v1::BuddyControl ToProto(const StepMemory& memory);
StepMemory FromProto(const v1::BuddyControl& control);

// By group.
using HyperparameterMap = std::map<std::string, Hyperparameters>;
void ToProto(const HyperparameterMap& values,
             google::protobuf::Map<std::string, v1::Hyperparameters>& messages);
HyperparameterMap FromProto(
    const google::protobuf::Map<std::string, v1::Hyperparameters>& messages);

}  // namespace muond
