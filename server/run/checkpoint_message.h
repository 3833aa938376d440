// A daemon's part of a checkpoint as a message, and back.
#pragma once

#include "absl/status/statusor.h"
#include "muond/v1/checkpoint.pb.h"
#include "server/checkpoint/part.h"

namespace muond {

void PartToProto(const checkpoint::Part& part, v1::SavePartReply* reply);
// INVALID_ARGUMENT for a dtype that is none.
absl::StatusOr<checkpoint::Part> PartFromProto(const v1::SavePartReply& reply);

}  // namespace muond
