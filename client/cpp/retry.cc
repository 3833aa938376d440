#include "client/cpp/retry.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

constexpr absl::Duration kInitialDelay = absl::Milliseconds(20);
constexpr absl::Duration kMaxDelay = absl::Seconds(1);

// Time was up before the daemon said anything: gRPC's own words, not a daemon's.
bool TimeWasUp(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) && status.message() == "Deadline Exceeded";
}

// gRPC's own words say neither which call nor which daemon.
absl::Status Explain(const RetryPlan& plan, const CallResult& result, int attempts,
                     absl::Duration elapsed) {
  const absl::Status& status = result.status;
  if (!absl::IsUnavailable(status) && !absl::IsCancelled(status) && !TimeWasUp(status)) {
    return status;
  }
  // A position comes from a daemon that is there and waits for something itself.
  const char* said = result.position.has_value() ? "still refused by" : "no answer from";
  return absl::Status(
      status.code(),
      absl::StrFormat("%s: %s %s within %s (%d attempt%s): %s", plan.what, said, plan.peer,
                      absl::FormatDuration(absl::Trunc(elapsed, absl::Milliseconds(1))), attempts,
                      attempts == 1 ? "" : "s", status.message()));
}

}  // namespace

bool WorthRepeating(const CallResult& result, CallKind kind, std::int64_t generation,
                    int attempts) {
  switch (result.status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
      return true;
    case absl::StatusCode::kDataLoss:
      return attempts <= kDataLossRepeats;
    case absl::StatusCode::kAborted:
      // A position without our generation says that the step must begin anew: not ours to decide.
      return kind == CallKind::kStream && attempts <= kDataLossRepeats &&
             (!result.position.has_value() || result.position->generation() == generation);
    default:
      return false;
  }
}

absl::Duration BackoffDelay(int attempts, absl::BitGenRef random) {
  const double doubled = std::ldexp(1.0, std::min(attempts - 1, 30));
  const absl::Duration whole = std::min(kInitialDelay * doubled, kMaxDelay);
  return whole * absl::Uniform(random, 0.5, 1.0);
}

CallResult CallWithRetries(const RetryPlan& plan,
                           const std::function<CallResult(const Attempt&)>& call,
                           const RetryClock& clock) {
  const absl::Time start = clock.now();
  absl::BitGen random;
  Attempt attempt{.number = 1, .deadline = start + plan.timeout};
  std::optional<CallResult> unavailable;  // the last such answer: it says who or what is missing
  for (;; ++attempt.number) {
    CallResult result = call(attempt);
    if (result.status.ok()) return result;
    const CallScope* const scope = CallScope::Current();
    if (scope != nullptr && scope->cancelled()) {
      result.status = absl::CancelledError(absl::StrFormat("%s: cancelled", plan.what));
      return result;
    }
    if (absl::IsUnavailable(result.status)) unavailable = result;
    const absl::Duration delay = BackoffDelay(attempt.number, random);
    if (!WorthRepeating(result, plan.kind, plan.generation, attempt.number) ||
        clock.now() + delay >= attempt.deadline || (scope != nullptr && scope->over())) {
      // A last attempt had no time left for an answer; the one before it had.
      if (TimeWasUp(result.status) && unavailable.has_value()) result = *std::move(unavailable);
      result.status = Explain(plan, result, attempt.number, clock.now() - start);
      return result;
    }
    (plan.pause ? plan.pause : clock.sleep)(delay);
  }
}

std::int64_t WaitMs(absl::Time deadline) {
  const absl::Duration left = deadline - SteadyNow();
  const absl::Duration margin =
      std::min(std::max(left / 20, absl::Milliseconds(50)), absl::Seconds(1));
  return std::max<std::int64_t>(absl::ToInt64Milliseconds(std::max(left - margin, left / 2)), 1);
}

}  // namespace muond::client
