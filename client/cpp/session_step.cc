// The steps of a session: in one call that recovers by itself, and in pieces.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/push_queue.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/recovery.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::client {
namespace {

absl::Status NotBegun(const std::string& run, const char* action) {
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": %s: no step was begun", run, action));
}

}  // namespace

CallResult Session::BeginOnce(const StepBegin& begin) {
  DrainQueue();
  queue_->Forget();
  whole_ = false;
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
  whole_ = true;
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
  return daemons_->ForEach([&](int daemon, Connection&) -> CallResult {
    std::vector<SlicePart> parts = PartsFor(daemon, gradients);
    if (parts.empty()) return {};
    return SendParts(daemon, action, std::move(parts), /*initial=*/false, nullptr);
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
  absl::Status pushed = PushOnce(gradients).status;
  whole_ = whole_ && pushed.ok();
  return pushed;
}

absl::StatusOr<StepOutcome> Session::Finish(const std::vector<std::string>& absent) {
  const Operation operation(*calls_);
  std::vector<v1::FinishReply> replies;
  MUOND_RETURN_IF_ERROR(FinishOnce(absent, &replies).status);
  return Consume(replies);
}

CallResult Session::SkipOnce(const v1::SkipRequest& request,
                             std::vector<v1::FinishReply>* replies) {
  replies->resize(daemons_->count());
  return daemons_->ForEach([&](int daemon, Connection& connection) {
    v1::SkipRequest own = request;
    return CallWithRetries(
        Plan(daemon, absl::StrFormat("skip step %d", request.step()), options_.step_timeout),
        [&](const Attempt& attempt) {
          own.set_wait_ms(WaitMs(attempt.deadline));
          return CallOnce(connection.control(), &v1::Optimizer::Stub::Skip, own,
                          &(*replies)[daemon], attempt);
        });
  });
}

absl::StatusOr<StepOutcome> Session::Skip(SkipCause cause, double loss_scale) {
  const Operation operation(*calls_);
  DrainQueue();
  v1::SkipRequest request;
  request.set_rank(rank_);
  request.set_step(next_step_);
  request.set_cause(ToProto(cause));
  request.set_loss_scale(loss_scale);
  Recovery recovery(*this, absl::StrFormat("skip of step %d", next_step_));
  for (;;) {
    *request.mutable_id() = Id();
    std::vector<v1::FinishReply> replies;
    const CallResult result = SkipOnce(request, &replies);
    if (result.status.ok()) {
      recovery.Done();
      return Consume(replies);
    }
    MUOND_RETURN_IF_ERROR(recovery.After(result, request.id().generation()));
    const auto consumed = Consumed(request.step(), result.status);
    if (!consumed.ok()) return recovery.GiveUp(consumed.status());
    if (!*consumed) continue;
    recovery.Done();
    return *last_outcome_;
  }
}

absl::StatusOr<StepOutcome> Session::FinishAndPull(std::span<const SliceSink> sinks,
                                                   const std::vector<std::string>& absent) {
  const Operation operation(*calls_);
  MUOND_RETURN_IF_ERROR(table_->Check(sinks, /*master=*/false));
  if (step_ < 0) return NotBegun(spec_.name, "finish");
  MUOND_RETURN_IF_ERROR(
      table_->CheckNames(absl::StrFormat("finish step %d", step_), absent));
  MUOND_RETURN_IF_ERROR(DrainQueue().status);
  std::vector<v1::FinishReply> replies;
  bool pulled = false;
  if (const auto direct = StepDirect({.absent = &absent, .sinks = sinks}, &pulled, &replies)) {
    MUOND_RETURN_IF_ERROR(direct->status);
    return Consume(replies);
  }
  MUOND_ASSIGN_OR_RETURN(StepOutcome outcome, Finish(absent));
  MUOND_RETURN_IF_ERROR(Pull(outcome.version, sinks));
  return outcome;
}

// After a Rejoin in the middle of a step: whether it was consumed meanwhile, else it can be taken
// again. ABORTED when the run stands elsewhere.
absl::StatusOr<bool> Session::Consumed(std::int64_t step, const absl::Status& cause) const {
  if (last_outcome_.has_value() && last_outcome_->step == step) return true;
  if (next_step_ == step) return false;
  return absl::AbortedError(absl::StrFormat(
      "run \"%s\": step %d: the run stands before step %d of generation %d now; pull version %d "
      "and go on from there (%s)",
      spec_.name, step, next_step_, generation_, next_step_, cause.message()));
}

CallResult Session::TryStep(const StepRequest& step, bool begun, bool* pulled,
                            std::vector<v1::FinishReply>* replies) {
  if (!begun) {
    DrainQueue();
    queue_->Forget();
    if (auto direct = StepDirect(step, pulled, replies)) return *std::move(direct);
    CallResult result = BeginOnce(*step.begin);
    if (!result.status.ok()) return result;
    // A step behind begins too: its outcome is there already, nothing may be pushed any more.
    const bool consumed = result.position->next_step() > step_;
    if (!consumed) result = PushOnce(step.gradients);
    if (!result.status.ok()) return result;
  }
  return FinishOnce(*step.absent, replies);
}

absl::StatusOr<StepOutcome> Session::TakeStep(StepBegin begin, bool begun,
                                              std::span<const SliceSource> gradients,
                                              std::span<const SliceSink> sinks,
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
  MUOND_RETURN_IF_ERROR(table_->Check(sinks, /*master=*/false));
  const StepRequest step{&begin, gradients, &absent, sinks};
  Recovery recovery(*this, absl::StrFormat("step %d", begin.step));
  begun = begun && whole_ && step_ == begin.step;
  bool pulled = false;
  for (;; begun = false) {
    std::vector<v1::FinishReply> replies;
    const std::int64_t generation = generation_;
    pulled = false;
    const CallResult result = TryStep(step, begun, &pulled, &replies);
    if (result.status.ok()) {
      MUOND_RETURN_IF_ERROR(Consume(replies).status());
      break;
    }
    MUOND_RETURN_IF_ERROR(recovery.After(result, generation));
    const auto consumed = Consumed(begin.step, result.status);
    if (!consumed.ok()) return recovery.GiveUp(consumed.status());
    if (*consumed) break;
  }
  recovery.Done();
  const StepOutcome outcome = *last_outcome_;
  if (!sinks.empty() && !pulled) MUOND_RETURN_IF_ERROR(Pull(outcome.version, sinks));
  return outcome;
}

absl::StatusOr<StepOutcome> Session::Step(StepBegin begin, std::span<const SliceSource> gradients,
                                          const std::vector<std::string>& absent) {
  return TakeStep(std::move(begin), /*begun=*/false, gradients, {}, absent);
}

absl::StatusOr<StepOutcome> Session::Complete(StepBegin begin,
                                              std::span<const SliceSource> gradients,
                                              const std::vector<std::string>& absent) {
  return TakeStep(std::move(begin), /*begun=*/true, gradients, {}, absent);
}

absl::StatusOr<StepOutcome> Session::StepAndPull(StepBegin begin,
                                                 std::span<const SliceSource> gradients,
                                                 std::span<const SliceSink> sinks,
                                                 const std::vector<std::string>& absent) {
  return TakeStep(std::move(begin), /*begun=*/false, gradients, sinks, absent);
}

}  // namespace muond::client
