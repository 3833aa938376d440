// Which failures are worth another attempt, and when: the one place where the client decides so.
//
// Every call of the service may be repeated, so the only questions are whether repeating can help
// and how long to wait. UNAVAILABLE and CANCELLED (a daemon that is going away) are repeated until
// the deadline; DATA_LOSS a few times, because a link that corrupts everything does not heal; an
// ABORTED stream while the generation still stands. All else needs the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/random/bit_gen_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/call_scope.h"
#include "grpcpp/client_context.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/steady_time.h"

namespace muond::client {

// What one attempt brought: its status, and where the run stands when a refusal said so.
struct CallResult {
  absl::Status status;
  std::optional<v1::RunPosition> position;
};

enum class CallKind { kControl, kStream };

struct RetryPlan {
  std::string what;  // object and action for messages: `run "kjv": push for step 3`
  std::string peer;  // the endpoint, for messages
  CallKind kind = CallKind::kControl;
  absl::Duration timeout;        // of all attempts together
  std::int64_t generation = 0;   // the caller's
  std::function<void(absl::Duration)> pause;  // between attempts; empty: the clock's sleep
};

struct Attempt {
  int number = 1;       // 1 for the first
  absl::Time deadline;  // the same for all
};

// Time as the retries see it; tests bring their own.
struct RetryClock {
  std::function<absl::Time()> now = [] { return SteadyNow(); };
  std::function<void(absl::Duration)> sleep = [](absl::Duration d) { CallScope::Sleep(d); };
};

// Repeats of DATA_LOSS before it is returned.
inline constexpr int kDataLossRepeats = 3;

// Can another attempt help after `attempts` of them, the last with this result?
bool WorthRepeating(const CallResult& result, CallKind kind, std::int64_t generation,
                    int attempts);

// The wait after `attempts` failures: 20 ms doubled each time up to 1 s, of which a random half to
// whole is taken so that ranks that failed together do not come back together.
absl::Duration BackoffDelay(int attempts, absl::BitGenRef random);

// Calls until OK, a result that is not worth repeating, until the thread's CallScope is over or the
// deadline leaves no time for another attempt; the last result then, with peer, attempts and time
// in its message. CANCELLED, with the plan's words alone, when the scope was cancelled. Where the
// last attempt had no time for an answer, the last UNAVAILABLE before it, which says more.
CallResult CallWithRetries(const RetryPlan& plan,
                           const std::function<CallResult(const Attempt&)>& call,
                           const RetryClock& clock = {});

// How long the daemon may wait for others: a little less than the call itself has, so that it is
// the daemon's answer, which names who is missing, that arrives. Milliseconds, at least 1.
std::int64_t WaitMs(absl::Time deadline);

// One unary call of the stub with a deadline, in the thread's CallScope.
template <typename Request, typename Reply>
CallResult CallOnce(v1::Optimizer::Stub& stub,
                    grpc::Status (v1::Optimizer::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Reply*),
                    const Request& request, Reply* reply, absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  const CallScope::Call scoped(context);
  reply->Clear();
  const grpc::Status status = (stub.*method)(&context, request, reply);
  if (status.ok()) return {};
  return {FromGrpc(status), PositionFrom(context)};
}

template <typename Request, typename Reply>
CallResult CallOnce(v1::Optimizer::Stub& stub,
                    grpc::Status (v1::Optimizer::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Reply*),
                    const Request& request, Reply* reply, const Attempt& attempt) {
  return CallOnce(stub, method, request, reply, attempt.deadline);
}

}  // namespace muond::client
