// Parameters that are added to the run.
#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/pair.h"
#include "client/cpp/recovery.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/steady_time.h"

namespace muond::client {

// Whether a call before has added them, and failed later.
bool Session::Has(const ParameterAddition& addition) const {
  const auto& mine = spec_.parameters;
  const auto& theirs = addition.parameters;
  return mine.size() > theirs.size() && !spec_.additions.empty() &&
         spec_.additions.back() == std::ssize(mine) - std::ssize(theirs) &&
         std::equal(theirs.begin(), theirs.end(), mine.end() - std::ssize(theirs));
}

absl::StatusOr<bool> Session::AskToAdd(const ParameterAddition& addition, std::string* name) {
  v1::AddParametersRequest request;
  request.set_rank(rank_);
  request.set_first(std::ssize(spec_.parameters));
  for (const GroupSpec& group : addition.groups) *request.add_groups() = ToProto(group);
  for (const ParameterSpec& parameter : addition.parameters) {
    *request.add_parameters() = ToProto(parameter);
  }
  SlicesToProto(addition.slices, request.mutable_slices());
  std::vector<v1::AddParametersReply> replies(daemons_->count());
  const std::int64_t step = next_step_;
  Recovery recovery(*this, "add parameters", /*adds=*/true);
  for (;;) {
    *request.mutable_id() = Id();
    const CallResult result = daemons_->ForEach([&](int daemon, Connection& connection) {
      v1::AddParametersRequest own = request;
      return CallWithRetries(
          Plan(daemon, "add parameters", options_.step_timeout), [&](const Attempt& attempt) {
            own.set_wait_ms(WaitMs(attempt.deadline));
            return CallOnce(connection.control(), &v1::Optimizer::Stub::AddParameters, own,
                            &replies[daemon], attempt);
          });
    });
    if (result.status.ok()) break;
    // Another rank, or a daemon that has restarted, may be raising the generation.
    MUOND_RETURN_IF_ERROR(recovery.After(result, request.id().generation()));
    if (next_step_ == step) continue;
    return recovery.GiveUp(absl::AbortedError(absl::StrFormat(
        "run \"%s\": add parameters: the run stands before step %d of generation %d now, not "
        "before step %d; pull version %d and go on from there (%s)",
        spec_.name, next_step_, generation_, step, next_step_, result.status.message())));
  }
  recovery.Done();
  bool all = true;
  for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
    all = all && replies[daemon].adopted();
    if (replies[daemon].addition() == replies[0].addition()) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": add parameters: daemons \"%s\" and \"%s\" would have different ones (%s and "
        "%s): they must run one version",
        spec_.name, (*daemons_)[0].peer(), (*daemons_)[daemon].peer(), replies[0].addition(),
        replies[daemon].addition()));
  }
  *name = replies[0].addition();
  return all;
}

absl::Status Session::AddParameters(const ParameterAddition& addition) {
  const Operation operation(*calls_);
  DrainQueue();
  if (addition.parameters.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": add parameters: there is none", spec_.name));
  }
  if (Has(addition)) return Rejoin();
  v1::RaiseGenerationRequest request;
  request.set_reason("parameters are added");
  MUOND_ASSIGN_OR_RETURN(const bool adopted, AskToAdd(addition, request.mutable_adopt()));
  const absl::Time start = SteadyNow();
  absl::BitGen random;
  for (int tries = 1;; ++tries) {
    *request.mutable_id() = Id();
    request.mutable_id()->set_generation(std::max(generation_, tries > 1 ? told_ : 0));
    if (!adopted) MUOND_RETURN_IF_ERROR(RaiseOnce(request));
    if (tries == 1) {
      spec_ = Extended(std::move(spec_), addition.groups, addition.parameters);
      slices_.insert(addition.slices.begin(), addition.slices.end());
      table_ = std::make_unique<SliceTable>(spec_, rank_, slices_);
      // Their windows were made for what there was.
      for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
        (*daemons_)[daemon].path().pair = nullptr;
      }
    }
    absl::Status joined = Rejoin();
    // Where whoever raised it has died half way, some daemons are still to follow.
    const bool behind = absl::IsInvalidArgument(joined) || absl::IsFailedPrecondition(joined);
    if (joined.ok() || !behind || SteadyNow() - start > options_.call_timeout) return joined;
    CallScope::Sleep(BackoffDelay(tries, random));
  }
}

}  // namespace muond::client
