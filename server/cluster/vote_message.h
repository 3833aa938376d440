// Votes and promises as messages, and back with every check that needs no state.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "muond/v1/peer.pb.h"
#include "server/step/step_machine.h"

namespace muond {

v1::VoteValue ToProto(const CastVote& cast);
// INVALID_ARGUMENT for counts below zero or sums out of range.
absl::StatusOr<CastVote> FromProto(const v1::VoteValue& message);

using VoteMessages = google::protobuf::RepeatedPtrField<v1::VoteValue>;
void VotesToProto(const std::vector<CastVote>& votes, VoteMessages* messages);
absl::StatusOr<std::vector<CastVote>> VotesFromProto(const VoteMessages& messages);

}  // namespace muond
