#include "server/cluster/vote_message.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond {
namespace {

absl::Status Malformed(const v1::VoteValue& message, const char* field) {
  return absl::InvalidArgumentError(absl::StrFormat("step %d: vote of daemon %d: field \"%s\" is "
                                                    "out of range",
                                                    message.step(), message.daemon(), field));
}

}  // namespace

v1::VoteValue ToProto(const CastVote& cast) {
  v1::VoteValue message;
  message.set_daemon(cast.daemon);
  message.set_generation(cast.vote.generation);
  message.set_step(cast.vote.step);
  message.set_terms(cast.vote.terms);
  const ExactSum::Digits sum = cast.vote.sum_squares.ToDigits();
  message.set_first_limb(sum.first);
  message.mutable_limbs()->Assign(sum.digits.begin(), sum.digits.end());
  message.set_nonfinite(cast.vote.nonfinite);
  message.set_state_overflows(cast.vote.state_overflows);
  message.set_trainer_skip(ToProto(cast.vote.trainer_skip));
  for (const std::string& name : cast.vote.offenders) message.add_offenders(name);
  return message;
}

absl::StatusOr<CastVote> FromProto(const v1::VoteValue& message) {
  CastVote cast;
  if (message.daemon() < 0 || message.daemon() > 1'000'000) return Malformed(message, "daemon");
  cast.daemon = static_cast<int>(message.daemon());
  Vote& vote = cast.vote;
  vote.generation = message.generation();
  vote.step = message.step();
  vote.terms = message.terms();
  const auto limbs = static_cast<std::size_t>(message.limbs_size());
  const auto sum = ExactSum::FromDigits(message.first_limb(), {message.limbs().data(), limbs});
  if (!sum) return Malformed(message, "limbs");
  vote.sum_squares = *sum;
  if (message.nonfinite() < 0) return Malformed(message, "nonfinite");
  vote.nonfinite = message.nonfinite();
  if (message.state_overflows() < 0) return Malformed(message, "state_overflows");
  vote.state_overflows = message.state_overflows();
  MUOND_ASSIGN_OR_RETURN(vote.trainer_skip, FromProto(message.trainer_skip()));
  if (message.offenders_size() > static_cast<int>(kMaxNames)) {
    return Malformed(message, "offenders");
  }
  vote.offenders.assign(message.offenders().begin(), message.offenders().end());
  return cast;
}

void VotesToProto(const std::vector<CastVote>& votes, VoteMessages* messages) {
  for (const CastVote& cast : votes) *messages->Add() = ToProto(cast);
}

absl::StatusOr<std::vector<CastVote>> VotesFromProto(const VoteMessages& messages) {
  std::vector<CastVote> votes;
  for (const v1::VoteValue& message : messages) {
    MUOND_ASSIGN_OR_RETURN(CastVote cast, FromProto(message));
    votes.push_back(std::move(cast));
  }
  return votes;
}

}  // namespace muond
