// The steps of a session: in one call that recovers by itself, and in pieces.
#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/push_queue.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::client {
namespace {

// Restarts of one step before its error is returned.
constexpr int kRestartsMax = 8;

absl::Status NotBegun(const std::string& run, const char* action) {
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": %s: no step was begun", run, action));
}

// The step must start again from Begin, after a Rejoin: the generation has been raised, or is being
// raised and this daemon is behind.
bool MustBeginAnew(const CallResult& result, std::int64_t generation) {
  if (absl::IsAborted(result.status)) return true;
  return absl::IsFailedPrecondition(result.status) && result.position.has_value() &&
         result.position->generation() != generation;
}

}  // namespace

CallResult Session::BeginOnce(const StepBegin& begin) {
  DrainQueue();
  queue_->Forget();
  StepBegin filled = begin;
  if (filled.step == 0) filled.step = next_step_;
  if (filled.loss_scale == 0) filled.loss_scale = loss_scale_;
  v1::BeginRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  ToProto(filled, &request);
  std::vector<v1::BeginReply> replies(daemons_->count());
  CallResult result = daemons_->ForEach([&](int daemon, Connection& connection) {
    return CallWithRetries(
        Plan(daemon, absl::StrFormat("begin step %d", filled.step), options_.call_timeout),
        [&](const Attempt& attempt) {
          return CallOnce(connection.control(), &v1::Optimizer::Stub::Begin, request,
                          &replies[daemon], attempt);
        });
  });
  if (!result.status.ok()) return result;
  step_ = filled.step;
  micro_batches_ = std::max<std::int64_t>(filled.micro_batches, 1);
  // One daemon that has consumed the step is proof that all have voted on it.
  const auto ahead = std::max_element(
      replies.begin(), replies.end(), [](const v1::BeginReply& a, const v1::BeginReply& b) {
        return a.position().next_step() < b.position().next_step();
      });
  result.position = std::move(*ahead->mutable_position());
  return result;
}

CallResult Session::PushOnce(std::span<const SliceSource> gradients) {
  if (step_ < 0) return {NotBegun(spec_.name, "push"), std::nullopt};
  const std::string action = absl::StrFormat("push for step %d", step_);
  if (absl::Status status = table_->Check(action, gradients, micro_batches_); !status.ok()) {
    return {std::move(status), std::nullopt};
  }
  if (gradients.empty()) return {};
  return daemons_->ForEach([&](int daemon, Connection& connection) -> CallResult {
    const std::vector<SlicePart> parts = PartsFor(daemon, gradients);
    if (parts.empty()) return {};
    RetryPlan plan = Plan(daemon, action, options_.bulk_timeout);
    plan.kind = CallKind::kStream;
    v1::PushReply reply;
    return CallWithRetries(plan, [&](const Attempt& attempt) -> CallResult {
      auto arena = ArenaOf(daemon);
      if (!arena.ok()) return {arena.status(), std::nullopt};
      const PushJob job{connection.bulk(), Id(),         rank_,
                        parts,             ChunkBytes(), *std::move(arena)};
      return SendPush(job, step_, attempt.deadline, &reply);
    });
  });
}

CallResult Session::FinishOnce(const std::vector<std::string>& absent,
                               std::vector<v1::FinishReply>* replies) {
  if (step_ < 0) return {NotBegun(spec_.name, "finish"), std::nullopt};
  const std::string action = absl::StrFormat("finish step %d", step_);
  if (absl::Status status = table_->CheckNames(action, absent); !status.ok()) {
    return {std::move(status), std::nullopt};
  }
  // A slice that did not arrive would leave the daemons waiting for it.
  if (CallResult pushed = DrainQueue(); !pushed.status.ok()) return pushed;
  v1::FinishRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  request.set_step(step_);
  for (const std::string& name : absent) request.add_absent(name);
  replies->resize(daemons_->count());
  return daemons_->ForEach([&](int daemon, Connection& connection) {
    v1::FinishRequest own = request;
    return CallWithRetries(
        Plan(daemon, action, options_.step_timeout), [&](const Attempt& attempt) {
          own.set_wait_ms(WaitMs(attempt.deadline));
          return CallOnce(connection.control(), &v1::Optimizer::Stub::Finish, own,
                          &(*replies)[daemon], attempt);
        });
  });
}

absl::StatusOr<StepOutcome> Session::Consume(const std::vector<v1::FinishReply>& replies) {
  StepOutcome outcome = FromProto(replies[0].outcome());
  for (std::size_t daemon = 1; daemon < replies.size(); ++daemon) {
    StepOutcome other = FromProto(replies[daemon].outcome());
    // What each daemon did itself adds up; all else is one verdict's.
    outcome.newton_schulz_calls += std::exchange(other.newton_schulz_calls, 0);
    outcome.newton_schulz_fallbacks += std::exchange(other.newton_schulz_fallbacks, 0);
    outcome.zero_inputs += std::exchange(other.zero_inputs, 0);
    StepOutcome verdict = outcome;
    verdict.newton_schulz_calls = verdict.newton_schulz_fallbacks = verdict.zero_inputs = 0;
    if (other == verdict) continue;
    return absl::InternalError(absl::StrFormat(
        "run \"%s\": step %d: daemons \"%s\" and \"%s\" tell different outcomes", spec_.name,
        outcome.step, (*daemons_)[0].peer(), (*daemons_)[static_cast<int>(daemon)].peer()));
  }
  next_step_ = outcome.version;
  loss_scale_ = outcome.next_loss_scale;
  last_outcome_ = outcome;
  return outcome;
}

absl::Status Session::Begin(const StepBegin& begin) {
  const Operation operation(*calls_);
  return BeginOnce(begin).status;
}

absl::StatusOr<std::shared_ptr<PushTicket>> Session::PushAsync(
    std::span<const SliceSource> gradients) {
  if (step_ < 0) return NotBegun(spec_.name, "push");
  MUOND_RETURN_IF_ERROR(
      table_->Check(absl::StrFormat("push for step %d", step_), gradients, micro_batches_));
  return queue_->Add(gradients);
}

absl::Status Session::Push(std::span<const SliceSource> gradients) {
  const Operation operation(*calls_);
  DrainQueue();
  return PushOnce(gradients).status;
}

absl::StatusOr<StepOutcome> Session::Finish(const std::vector<std::string>& absent) {
  const Operation operation(*calls_);
  std::vector<v1::FinishReply> replies;
  MUOND_RETURN_IF_ERROR(FinishOnce(absent, &replies).status);
  return Consume(replies);
}

absl::StatusOr<StepOutcome> Session::Skip(SkipCause cause, double loss_scale) {
  const Operation operation(*calls_);
  DrainQueue();
  v1::SkipRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  request.set_step(next_step_);
  request.set_cause(ToProto(cause));
  request.set_loss_scale(loss_scale);
  std::vector<v1::FinishReply> replies(daemons_->count());
  const CallResult result = daemons_->ForEach([&](int daemon, Connection& connection) {
    v1::SkipRequest own = request;
    return CallWithRetries(
        Plan(daemon, absl::StrFormat("skip step %d", next_step_), options_.step_timeout),
        [&](const Attempt& attempt) {
          own.set_wait_ms(WaitMs(attempt.deadline));
          return CallOnce(connection.control(), &v1::Optimizer::Stub::Skip, own,
                          &replies[daemon], attempt);
        });
  });
  MUOND_RETURN_IF_ERROR(result.status);
  return Consume(replies);
}

absl::StatusOr<std::optional<StepOutcome>> Session::TryStep(
    const StepBegin& begin, std::span<const SliceSource> gradients,
    const std::vector<std::string>& absent) {
  std::vector<v1::FinishReply> replies;
  const std::int64_t generation = generation_;
  CallResult result = BeginOnce(begin);
  // A step behind begins too: its outcome is there already, nothing may be pushed any more.
  const bool consumed = result.status.ok() && result.position->next_step() > step_;
  if (result.status.ok() && !consumed) result = PushOnce(gradients);
  if (result.status.ok()) result = FinishOnce(absent, &replies);
  if (result.status.ok()) {
    MUOND_ASSIGN_OR_RETURN(StepOutcome outcome, Consume(replies));
    return std::optional<StepOutcome>(std::move(outcome));
  }
  if (!MustBeginAnew(result, generation)) return result.status;
  MUOND_RETURN_IF_ERROR(Rejoin());
  MUOND_RETURN_IF_ERROR(mixed_);
  if (last_outcome_.has_value() && last_outcome_->step == begin.step) return last_outcome_;
  if (next_step_ == begin.step) return std::optional<StepOutcome>();
  return absl::AbortedError(absl::StrFormat(
      "run \"%s\": step %d: the run stands before step %d of generation %d now; pull version %d "
      "and go on from there (%s)",
      spec_.name, begin.step, next_step_, generation_, next_step_, result.status.message()));
}

absl::StatusOr<StepOutcome> Session::Step(StepBegin begin, std::span<const SliceSource> gradients,
                                          const std::vector<std::string>& absent) {
  const Operation operation(*calls_);
  if (begin.step == 0) begin.step = next_step_;
  if (begin.loss_scale == 0) begin.loss_scale = loss_scale_;
  // Before Begin, so that a caller's mistake does not leave a step half announced.
  const std::string action = absl::StrFormat("push for step %d", begin.step);
  MUOND_RETURN_IF_ERROR(
      table_->Check(action, gradients, std::max<std::int64_t>(begin.micro_batches, 1)));
  MUOND_RETURN_IF_ERROR(
      table_->CheckNames(absl::StrFormat("finish step %d", begin.step), absent));
  absl::BitGen random;
  const absl::Time start = absl::Now();
  // Where daemons are of different generations they see to that themselves, but it takes a while.
  const auto raising = [&] {
    return !one_generation_ && absl::Now() - start < options_.call_timeout;
  };
  for (int restarts = 1; restarts <= kRestartsMax || raising(); ++restarts) {
    MUOND_ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, TryStep(begin, gradients, absent));
    if (outcome.has_value()) return *std::move(outcome);
    CallScope::Sleep(BackoffDelay(restarts, random));
  }
  return absl::AbortedError(absl::StrFormat("run \"%s\": step %d: given up after %d restarts",
                                            spec_.name, begin.step, kRestartsMax));
}

}  // namespace muond::client
