#include "client/cpp/recovery.h"

#include <algorithm>
#include <iostream>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/call_scope.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

// Equal answers of NOT_FOUND before it is taken for what it says.
constexpr int kNotFoundMax = 3;

}  // namespace

std::string Describe(const Interruption& interruption) {
  std::string what = absl::StrFormat("run \"%s\": rank %d: %s", interruption.run, interruption.rank,
                                     interruption.action);
  const std::string elapsed =
      absl::FormatDuration(absl::Trunc(interruption.elapsed, absl::Milliseconds(1)));
  switch (interruption.phase) {
    case Interruption::Phase::kBegun:
      return absl::StrFormat("%s was interrupted, rejoining for at most %s: %s", what,
                             absl::FormatDuration(absl::Ceil(interruption.left, absl::Seconds(1))),
                             interruption.cause.message());
    case Interruption::Phase::kLasting:
      return absl::StrFormat("%s is interrupted still, after %s: %s", what, elapsed,
                             interruption.cause.message());
    case Interruption::Phase::kOver:
      return absl::StrFormat("%s is done after an interruption of %s: attempt %d, generation %d",
                             what, elapsed, interruption.attempts, interruption.generation);
    case Interruption::Phase::kGivenUp:
      return absl::StrFormat("%s is given up after %s: %s", what, elapsed,
                             interruption.cause.message());
  }
  return what;
}

bool Interrupted(const CallResult& result, std::int64_t generation) {
  const bool placed = result.position.has_value();
  switch (result.status.code()) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kNotFound:  // mostly the run or the rank
      return true;
    case absl::StatusCode::kUnavailable:
      // Where initial values are missing nobody has gone away.
      return !placed || result.position->state() != v1::RUN_STATE_OPENING;
    case absl::StatusCode::kFailedPrecondition:
      return placed && (result.position->generation() != generation ||
                        result.position->state() == v1::RUN_STATE_NEEDS_RESTORE);
    default:
      return false;
  }
}

Recovery::Recovery(Session& session, std::string action, bool adds)
    : session_(session),
      action_(std::move(action)),
      adds_(adds),
      lineage_(session.registered_.position().lineage()) {}

absl::Status Recovery::After(const CallResult& failure, std::int64_t generation) {
  ++attempts_;
  alike_ = failure.status == failure_ ? alike_ + 1 : 1;
  failure_ = failure.status;
  // What is not found by a run that stands was never there.
  const bool never_there = absl::IsNotFound(failure.status) && alike_ > kNotFoundMax;
  if (!Interrupted(failure, generation) || never_there) {
    return start_ == absl::InfiniteFuture() ? failure.status : GiveUp(failure.status);
  }
  if (session_.options_.recovery_timeout <= absl::ZeroDuration()) return failure.status;
  if (start_ == absl::InfiniteFuture()) {
    start_ = SteadyNow();
    Tell(Interruption::Phase::kBegun, failure.status);
  } else {
    Tell(Interruption::Phase::kLasting, failure.status);
  }
  return Await(failure.status);
}

absl::Status Recovery::Await(absl::Status cause) {
  for (int looks = 1;; ++looks) {
    // Ranks and daemons that were interrupted together do not come back together.
    const absl::Duration pause = BackoffDelay(std::max(looks, attempts_), random_);
    if (SteadyNow() + pause >= deadline()) return GiveUp(cause);
    CallScope::Sleep(pause);
    if (CallScope::CurrentIsOver()) {
      return GiveUp(absl::CancelledError(
          absl::StrFormat("run \"%s\": %s: cancelled", session_.spec_.name, action_)));
    }
    bool again = false;
    absl::Status looked = Look(&again);
    if (looked.ok()) return looked;
    if (!again) return GiveUp(looked);
    cause = std::move(looked);
    if (cause != told_) Tell(Interruption::Phase::kLasting, cause);
  }
}

absl::Status Recovery::Look(bool* again) {
  absl::Status joined = session_.RejoinBy(deadline());
  if (!joined.ok()) {
    *again = absl::IsUnavailable(joined) || absl::IsDeadlineExceeded(joined);
    return joined;
  }
  const v1::RunState state = session_.state();
  if (state == v1::RUN_STATE_NEEDS_RESTORE) {
    *again = true;
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": needs a restore before step %d, which its daemons see to "
                        "where they have a checkpoint",
                        session_.spec_.name, session_.next_step_));
  }
  if (!session_.mixed_.ok()) {
    // While the generation is raised one daemon has new state, the next one not yet.
    mixed_since_ = std::min(mixed_since_, SteadyNow());
    *again = !session_.one_generation_ &&
             SteadyNow() < mixed_since_ + session_.options_.call_timeout;
    return session_.mixed_;
  }
  mixed_since_ = absl::InfiniteFuture();
  if (state == v1::RUN_STATE_OPENING && OnlyAddedAreMissing()) {
    if (adds_) return absl::OkStatus();
    *again = true;
    return absl::UnavailableError(
        absl::StrFormat("run \"%s\": %s: not all values of the parameters that were added are "
                        "there yet",
                        session_.spec_.name, action_));
  }
  if (state == v1::RUN_STATE_OPENING) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": %s: the run has lost its state and there is no checkpoint of it, or it was "
        "closed: go on from the trainers' parameters (Reinitialize, or Initialize)",
        session_.spec_.name, action_));
  }
  return absl::OkStatus();
}

// Of an opening run: its state is the one of before, to which parameters were added. By this
// session or, before it has heard of that, by another rank.
bool Recovery::OnlyAddedAreMissing() const {
  const v1::RunPosition& position = session_.registered_.position();
  return lineage_ > 0 && position.lineage() == lineage_ && position.next_step() > 0;
}

void Recovery::Done() {
  ++attempts_;
  if (start_ != absl::InfiniteFuture()) Tell(Interruption::Phase::kOver, absl::OkStatus());
}

absl::Status Recovery::GiveUp(const absl::Status& cause) {
  Tell(Interruption::Phase::kGivenUp, cause);
  return cause;
}

void Recovery::Tell(Interruption::Phase phase, const absl::Status& cause) {
  told_ = cause;
  const absl::Time now = SteadyNow();
  const Interruption interruption{.phase = phase,
                                  .run = session_.spec_.name,
                                  .rank = session_.rank_,
                                  .action = action_,
                                  .cause = cause,
                                  .attempts = attempts_,
                                  .elapsed = now - start_,
                                  .left = std::max(deadline() - now, absl::ZeroDuration()),
                                  .generation = session_.generation_};
  if (session_.options_.on_interruption) return session_.options_.on_interruption(interruption);
  std::cerr << "muond: " + Describe(interruption) + "\n";
}

}  // namespace muond::client
