// The steps of a session: in one call that recovers by itself, and in pieces.
#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "client/cpp/connection.h"
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

// How long the daemon may wait for the other ranks: a little less than the call itself has, so that
// it is the daemon's DEADLINE_EXCEEDED, which names who is missing, that arrives.
std::int64_t WaitMs(absl::Time deadline) {
  const absl::Duration left = deadline - absl::Now();
  const absl::Duration margin =
      std::min(std::max(left / 20, absl::Milliseconds(50)), absl::Seconds(1));
  return std::max<std::int64_t>(absl::ToInt64Milliseconds(std::max(left - margin, left / 2)), 1);
}

absl::Status NotBegun(const std::string& run, const char* action) {
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": %s: no step was begun", run, action));
}

// The step must start again from Begin, after a Rejoin.
bool MustBeginAnew(const CallResult& result, std::int64_t generation) {
  if (absl::IsAborted(result.status)) return true;
  return absl::IsFailedPrecondition(result.status) && result.position.has_value() &&
         result.position->generation() > generation;
}

}  // namespace

CallResult Session::BeginOnce(const StepBegin& begin) {
  StepBegin filled = begin;
  if (filled.step == 0) filled.step = next_step_;
  if (filled.loss_scale == 0) filled.loss_scale = loss_scale_;
  v1::BeginRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  ToProto(filled, &request);
  v1::BeginReply reply;
  CallResult result = CallWithRetries(
      Plan(absl::StrFormat("begin step %d", filled.step), options_.call_timeout),
      [&](const Attempt& attempt) {
        return CallOnce(connection_->control(), &v1::Optimizer::Stub::Begin, request, &reply,
                        attempt.deadline);
      });
  if (result.status.ok()) {
    step_ = filled.step;
    micro_batches_ = std::max<std::int64_t>(filled.micro_batches, 1);
    result.position = std::move(*reply.mutable_position());
  }
  return result;
}

CallResult Session::PushOnce(std::span<const SliceSource> gradients) {
  if (step_ < 0) return {NotBegun(spec_.name, "push"), std::nullopt};
  const std::string action = absl::StrFormat("push for step %d", step_);
  if (absl::Status status = table_->Check(action, gradients, micro_batches_); !status.ok()) {
    return {std::move(status), std::nullopt};
  }
  if (gradients.empty()) return {};
  const PushJob job{connection_->bulk(), Id(), rank_, gradients, ChunkBytes()};
  RetryPlan plan = Plan(action, options_.bulk_timeout);
  plan.kind = CallKind::kStream;
  v1::PushReply reply;
  return CallWithRetries(plan, [&](const Attempt& attempt) {
    return SendPush(job, step_, attempt.deadline, &reply);
  });
}

CallResult Session::FinishOnce(const std::vector<std::string>& absent, v1::FinishReply* reply) {
  if (step_ < 0) return {NotBegun(spec_.name, "finish"), std::nullopt};
  const std::string action = absl::StrFormat("finish step %d", step_);
  if (absl::Status status = table_->CheckNames(action, absent); !status.ok()) {
    return {std::move(status), std::nullopt};
  }
  v1::FinishRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  request.set_step(step_);
  for (const std::string& name : absent) request.add_absent(name);
  return CallWithRetries(Plan(action, options_.step_timeout), [&](const Attempt& attempt) {
    request.set_wait_ms(WaitMs(attempt.deadline));
    return CallOnce(connection_->control(), &v1::Optimizer::Stub::Finish, request, reply,
                    attempt.deadline);
  });
}

absl::StatusOr<StepOutcome> Session::Consume(const v1::FinishReply& reply) {
  StepOutcome outcome = FromProto(reply.outcome());
  next_step_ = outcome.version;
  loss_scale_ = outcome.next_loss_scale;
  last_outcome_ = outcome;
  return outcome;
}

absl::Status Session::Begin(const StepBegin& begin) { return BeginOnce(begin).status; }

absl::Status Session::Push(std::span<const SliceSource> gradients) {
  return PushOnce(gradients).status;
}

absl::StatusOr<StepOutcome> Session::Finish(const std::vector<std::string>& absent) {
  v1::FinishReply reply;
  MUOND_RETURN_IF_ERROR(FinishOnce(absent, &reply).status);
  return Consume(reply);
}

absl::StatusOr<StepOutcome> Session::Skip(SkipCause cause, double loss_scale) {
  v1::SkipRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  request.set_step(next_step_);
  request.set_cause(ToProto(cause));
  request.set_loss_scale(loss_scale);
  v1::FinishReply reply;
  const CallResult result = CallWithRetries(
      Plan(absl::StrFormat("skip step %d", next_step_), options_.step_timeout),
      [&](const Attempt& attempt) {
        request.set_wait_ms(WaitMs(attempt.deadline));
        return CallOnce(connection_->control(), &v1::Optimizer::Stub::Skip, request, &reply,
                        attempt.deadline);
      });
  MUOND_RETURN_IF_ERROR(result.status);
  return Consume(reply);
}

absl::StatusOr<std::optional<StepOutcome>> Session::TryStep(
    const StepBegin& begin, std::span<const SliceSource> gradients,
    const std::vector<std::string>& absent) {
  v1::FinishReply reply;
  const std::int64_t generation = generation_;
  CallResult result = BeginOnce(begin);
  // A step behind begins too: its outcome is there already, nothing may be pushed any more.
  const bool consumed = result.status.ok() && result.position->next_step() > step_;
  if (result.status.ok() && !consumed) result = PushOnce(gradients);
  if (result.status.ok()) result = FinishOnce(absent, &reply);
  if (result.status.ok()) {
    MUOND_ASSIGN_OR_RETURN(StepOutcome outcome, Consume(reply));
    return std::optional<StepOutcome>(std::move(outcome));
  }
  if (!MustBeginAnew(result, generation)) return result.status;
  MUOND_RETURN_IF_ERROR(Rejoin());
  if (last_outcome_.has_value() && last_outcome_->step == begin.step) return last_outcome_;
  if (next_step_ == begin.step) return std::optional<StepOutcome>();
  return absl::AbortedError(absl::StrFormat(
      "run \"%s\": step %d: the run stands before step %d of generation %d now; pull version %d "
      "and go on from there (%s)",
      spec_.name, begin.step, next_step_, generation_, next_step_, result.status.message()));
}

absl::StatusOr<StepOutcome> Session::Step(StepBegin begin, std::span<const SliceSource> gradients,
                                          const std::vector<std::string>& absent) {
  if (begin.step == 0) begin.step = next_step_;
  if (begin.loss_scale == 0) begin.loss_scale = loss_scale_;
  // Before Begin, so that a caller's mistake does not leave a step half announced.
  const std::string action = absl::StrFormat("push for step %d", begin.step);
  MUOND_RETURN_IF_ERROR(
      table_->Check(action, gradients, std::max<std::int64_t>(begin.micro_batches, 1)));
  MUOND_RETURN_IF_ERROR(
      table_->CheckNames(absl::StrFormat("finish step %d", begin.step), absent));
  absl::BitGen random;
  for (int restarts = 1; restarts <= kRestartsMax; ++restarts) {
    MUOND_ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, TryStep(begin, gradients, absent));
    if (outcome.has_value()) return *std::move(outcome);
    absl::SleepFor(BackoffDelay(restarts, random));
  }
  return absl::AbortedError(absl::StrFormat("run \"%s\": step %d: given up after %d restarts",
                                            spec_.name, begin.step, kRestartsMax));
}

}  // namespace muond::client
