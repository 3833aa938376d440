// How a rank ends a step (Finish, Skip), who waits for its outcome and who is told what.
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/step/step_machine.h"

namespace muond {
namespace {

std::string Name(SkipCause cause) { return std::string(SkipCauseName(cause)); }

std::string Describe(const SkipWord& word) {
  if (!word.loss_scale) return absl::StrFormat("cause %s", Name(word.cause));
  return absl::StrFormat("cause %s at loss scale %.17g", Name(word.cause), *word.loss_scale);
}

}  // namespace

// What Finish and Skip of the step in flight have in common. A rank that has to be told that its
// attempt was discarded is told here.
absl::Status StepMachine::CheckEnding(const Call& call) {
  MUOND_RETURN_IF_ERROR(CheckStep(call));
  // The call may be a repeat for a step that is being committed: its outcome is at hand.
  if (phase_ != Phase::kCommitting) MUOND_RETURN_IF_ERROR(CheckOpen(call));
  MUOND_RETURN_IF_ERROR(no_verdict_);
  if (const auto found = rejected_.find(call.rank); found != rejected_.end()) {
    absl::Status status = found->second;
    rejected_.erase(found);
    return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::set<int>> StepMachine::CheckAbsent(
    const Call& call, const std::vector<std::string>& names) const {
  if (attempt_.Skipped(call.rank)) {
    return absl::FailedPreconditionError(Describe(call) + "the rank has skipped the step");
  }
  if (!attempt_.Begun(call.rank)) {
    return absl::FailedPreconditionError(Describe(call) + "the rank has not begun the step");
  }
  std::set<int> absent;
  for (const std::string& name : names) {
    const int p = index_->Find(name);
    if (p < 0) {
      return absl::NotFoundError(
          absl::StrFormat("%sabsent parameter \"%s\": no such parameter", Describe(call), name));
    }
    if (attempt_.Pushed(p, call.rank)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter \"%s\": finish of step %d: named absent by rank %d, which has "
                          "pushed slices of it",
                          name, call.step, call.rank));
    }
    if (index_->Registered(p, call.rank) > 0) absent.insert(p);
  }
  const std::set<int>* before = attempt_.AbsentOf(call.rank);
  if (phase_ != Phase::kCollecting && before != nullptr && *before != absent) {
    return absl::InvalidArgumentError(
        Describe(call) + "the list of absent parameters is not that of the rank's first finish");
  }
  return absent;
}

void StepMachine::OnFinish(std::int64_t rank, std::int64_t generation, std::int64_t step,
                           const std::vector<std::string>& absent, std::uint64_t waiter,
                           Effects& effects) {
  const Call call{"finish", rank, generation, step};
  if (const absl::Status status = CheckRank(call); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  if (const absl::Status status = CheckGeneration(call); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  if (IsLast(step)) return ReplyLast(waiter, effects);
  if (const absl::Status status = CheckEnding(call); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  const auto parameters = CheckAbsent(call, absent);
  if (!parameters.ok()) return Reply(waiter, parameters.status(), effects);
  if (!attempt_.skipped().empty()) {
    std::set<std::int64_t> skipped;
    for (const auto& [other, word] : attempt_.skipped()) skipped.insert(other);
    const absl::Status status = FinishedAndSkipped(call, {rank}, skipped);
    Reply(waiter, status, effects);
    return Reject(rank, status, effects);
  }
  waiters_[waiter] = rank;
  attempt_.Finish(rank, *parameters);
  Advance(effects);
}

absl::Status StepMachine::CheckSkip(const Call& call, const SkipWord& word) const {
  if (word.cause != SkipCause::kOverflow && word.cause != SkipCause::kTrainer) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%scause \"%s\": expected overflow or trainer", Describe(call), Name(word.cause)));
  }
  if (word.loss_scale) {
    if (const absl::Status told = scaler_.CheckTold(*word.loss_scale); !told.ok()) {
      return absl::InvalidArgumentError(Describe(call) + std::string(told.message()));
    }
  }
  if (attempt_.Finished(call.rank)) {
    return absl::FailedPreconditionError(Describe(call) + "the rank has finished the step");
  }
  // Once the vote is cast a word may be repeated, but names nothing that the vote does not know.
  if (phase_ == Phase::kVoting && attempt_.Skipped(call.rank) &&
      word != attempt_.skipped().at(call.rank)) {
    return absl::InvalidArgumentError(Describe(call) +
                                      "the skip is not what the rank said at first");
  }
  return absl::OkStatus();
}

absl::Status StepMachine::FinishedAndSkipped(const Call& call,
                                             const std::set<std::int64_t>& finished,
                                             const std::set<std::int64_t>& skipped) const {
  return absl::InvalidArgumentError(absl::StrFormat(
      "step %d: ranks disagree: ranks [%s] finished, ranks [%s] skipped; begin the step again",
      call.step, absl::StrJoin(finished, ", "), absl::StrJoin(skipped, ", ")));
}

// OK iff the word agrees with what all others, and the rank itself, said before.
absl::Status StepMachine::SkipDisagreement(const Call& call, const SkipWord& word) const {
  if (attempt_.AnyFinished()) {
    return FinishedAndSkipped(call, attempt_.FinishedRanks(), {call.rank});
  }
  const SkipCause cause =
      attempt_.skipped().empty() ? word.cause : attempt_.skipped().begin()->second.cause;
  const std::optional<double> scale = attempt_.NamedScale();
  if (cause == word.cause && (!scale || !word.loss_scale || *scale == *word.loss_scale)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("step %d: skip: ranks disagree: ranks [%s] said %s, rank %d said %s",
                      call.step, absl::StrJoin(attempt_.Participants(), ", "),
                      muond::Describe(SkipWord{cause, scale}), call.rank, muond::Describe(word)));
}

void StepMachine::OnSkip(std::int64_t rank, std::int64_t generation, std::int64_t step,
                         SkipCause cause, double loss_scale, std::uint64_t waiter,
                         Effects& effects) {
  const Call call{"skip", rank, generation, step};
  if (const absl::Status status = CheckRank(call); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  if (const absl::Status status = CheckGeneration(call); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  if (IsLast(step)) return ReplyLast(waiter, effects);
  if (const absl::Status status = CheckEnding(call); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  SkipWord word{cause, std::nullopt};
  if (loss_scale != 0) word.loss_scale = loss_scale;
  if (const absl::Status status = CheckSkip(call, word); !status.ok()) {
    return Reply(waiter, status, effects);
  }
  if (const absl::Status status = SkipDisagreement(call, word); !status.ok()) {
    Reply(waiter, status, effects);
    return Reject(rank, status, effects);
  }
  waiters_[waiter] = rank;
  attempt_.Skip(rank, word);
  Advance(effects);
}

void StepMachine::OnDeadline(std::uint64_t waiter, Effects& effects) {
  const auto found = waiters_.find(waiter);
  if (found == waiters_.end()) return;
  const std::string missing = DescribeMissing();
  const std::int64_t rank = found->second;
  waiters_.erase(found);
  const char* action = attempt_.Skipped(rank) ? "skip" : "finish";
  Reply(waiter,
        absl::DeadlineExceededError(absl::StrFormat(
            "step %d: %s by rank %d: deadline passed; missing: %s; what has come in is kept",
            next_step_, action, rank, missing)),
        effects);
}

void StepMachine::OnWaiterGone(std::uint64_t waiter) { waiters_.erase(waiter); }

void StepMachine::Reply(std::uint64_t waiter, const absl::Status& status, Effects& effects) const {
  MUOND_CHECK(!status.ok(), "a good reply carries an outcome");
  effects.push_back(ReplyEffect{waiter, status, std::nullopt});
}

void StepMachine::ReplyLast(std::uint64_t waiter, Effects& effects) const {
  if (!last_status_.ok()) return Reply(waiter, last_status_, effects);
  effects.push_back(ReplyEffect{waiter, absl::OkStatus(), last_outcome_});
}

void StepMachine::ReplyAll(const absl::Status& status, Effects& effects) {
  for (const auto& [waiter, rank] : waiters_) Reply(waiter, status, effects);
  waiters_.clear();
}

// Ranks disagree: tells all of them, now or at their next call, and starts the step over. The
// caller has been told.
void StepMachine::Reject(std::int64_t caller, const absl::Status& status, Effects& effects) {
  // What all ranks have ended is decided, and this daemon may have voted: a late word is too late.
  if (phase_ != Phase::kCollecting) return;
  std::set<std::int64_t> untold = attempt_.Participants();
  untold.erase(caller);
  for (const auto& [waiter, rank] : waiters_) untold.erase(rank);
  for (const std::int64_t rank : untold) rejected_[rank] = status;
  ReplyAll(status, effects);
  Discard(effects);
}

}  // namespace muond
