// Brings a session back to a run that was interrupted (interruption.h): the one place that decides
// which failures are interruptions, and how long they may last.
#pragma once

#include <cstdint>
#include <string>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/interruption.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"

namespace muond::client {

// Whether rejoining may help after this result of a call under `generation`.
bool Interrupted(const CallResult& result, std::int64_t generation);

// Of one action, within one Operation (call_scope.h); made before its first attempt.
class Recovery {
 public:
  // `action` for messages: "step 41". `adds`: parameters; that values of added ones are missing is
  // then nothing to wait for, since the caller is to send them.
  Recovery(Session& session, std::string action, bool adds = false);

  // After an attempt that failed under `generation`: rejoins until the run can go on. OK: try
  // again, or look where the run stands now; else the error for the caller: `failure`'s own where
  // it is no interruption or lasts too long, CANCELLED, FAILED_PRECONDITION when the run's state is
  // lost for good.
  absl::Status After(const CallResult& failure, std::int64_t generation);
  // The action is done.
  void Done();
  // It is not, and that is for the caller to hear; returns `cause`.
  absl::Status GiveUp(const absl::Status& cause);

 private:
  absl::Status Await(absl::Status cause);
  // OK with `again` unset: the run stands. Else an error for the caller, or what to wait for.
  absl::Status Look(bool* again);
  bool OnlyAddedAreMissing() const;
  void Tell(Interruption::Phase phase, const absl::Status& cause);
  absl::Time deadline() const { return start_ + session_.options_.recovery_timeout; }

  Session& session_;
  const std::string action_;
  const bool adds_;
  const std::int64_t lineage_;  // of the state that the session knew
  absl::Time start_ = absl::InfiniteFuture();  // of the first failure
  absl::Time mixed_since_ = absl::InfiniteFuture();
  int attempts_ = 0;
  absl::Status failure_;  // of the last attempt
  int alike_ = 0;         // attempts in a row that failed as the last one did
  absl::Status told_;     // last
  absl::BitGen random_;
};

}  // namespace muond::client
