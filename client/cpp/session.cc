// Joining and leaving a run; session_values.cc has its parameters on the way in and out,
// session_step.cc the steps.
#include "client/cpp/session.h"

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/owner_table.h"
#include "client/cpp/push_queue.h"
#include "client/cpp/retry.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/steady_time.h"
#include "proto/version.h"

namespace muond::client {
namespace {

// Of a call that comes late: enough for an answer that is there.
constexpr absl::Duration kShortestCall = absl::Milliseconds(100);
constexpr char kClientName[] = "muond-client/" MUOND_VERSION " (c++)";

absl::Status CheckOptions(const SessionOptions& options) {
  const auto check_timeout = [](const char* name, absl::Duration value) {
    if (value > absl::ZeroDuration()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrFormat("session options: %s: expected a positive time, got %s", name,
                        absl::FormatDuration(value)));
  };
  MUOND_RETURN_IF_ERROR(check_timeout("call_timeout", options.call_timeout));
  MUOND_RETURN_IF_ERROR(check_timeout("step_timeout", options.step_timeout));
  MUOND_RETURN_IF_ERROR(check_timeout("bulk_timeout", options.bulk_timeout));
  constexpr const char* kTransports[] = {"auto", "grpc", "arena", "cuda-ipc", "nccl", "pointer"};
  if (std::find(std::begin(kTransports), std::end(kTransports), options.transport) ==
      std::end(kTransports)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "session options: transport \"%s\": expected auto, grpc, arena, cuda-ipc, nccl or pointer",
        options.transport));
  }
  constexpr std::int64_t kMin = 1024;
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // far below protobuf's 2 GiB
  if (options.chunk_bytes < kMin || options.chunk_bytes > kMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("session options: chunk_bytes: expected %d to %d, got %d", kMin, kMax,
                        options.chunk_bytes));
  }
  return absl::OkStatus();
}

bool SameDaemons(const v1::RegisterReply& a, const v1::RegisterReply& b) {
  return std::equal(a.daemons().begin(), a.daemons().end(), b.daemons().begin(),
                    b.daemons().end());
}

}  // namespace

Session::Session()
    : calls_(std::make_unique<CallScope>(nullptr)),
      queue_(std::make_unique<PushQueue>(*calls_, [this](std::span<const SliceSource> gradients) {
        return PushOnce(gradients);
      })) {}

Session::~Session() = default;

absl::StatusOr<std::unique_ptr<Session>> Session::Open(const RunSpec& spec, std::int64_t rank,
                                                       const RankSlices& slices,
                                                       const SessionOptions& options) {
  MUOND_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<Session> session(new Session());
  MUOND_ASSIGN_OR_RETURN(session->daemons_,
                         Daemons::Open(options.endpoint, options.channel, options.chunk_bytes,
                                       options.tls));
  session->options_ = options;
  session->spec_ = spec;
  session->slices_ = slices;
  session->rank_ = rank;
  session->table_ = std::make_unique<SliceTable>(session->spec_, rank, session->slices_);
  MUOND_RETURN_IF_ERROR(session->SetUpGpu());
  MUOND_RETURN_IF_ERROR(session->Rejoin());
  return session;
}

int Session::daemons() const { return daemons_->count(); }

CallResult Session::RegisterWith(int daemon, absl::Duration timeout, v1::RegisterReply* reply) {
  v1::RegisterRequest request;
  *request.mutable_run() = ToProto(spec_);
  request.set_rank(rank_);
  request.set_session(options_.session);
  SlicesToProto(slices_, request.mutable_slices());
  request.set_client(kClientName);
  request.set_version(std::string(OwnVersion()));
  if (options_.transport != "auto") request.set_transport(options_.transport);
  OfferPaths(&request);
  CallResult result = CallWithRetries(
      Plan(daemon, "register", timeout), [&](const Attempt& attempt) {
        return CallOnce((*daemons_)[daemon].control(), &v1::Optimizer::Stub::Register, request,
                        reply, attempt);
      });
  if (result.status.ok()) {
    result.status = CheckVersions(OwnVersion(), reply->version(),
                                  absl::StrFormat("run \"%s\": register: daemon \"%s\"",
                                                  spec_.name, (*daemons_)[daemon].peer()));
  }
  if (result.status.ok()) result.status = ChoosePath(daemon, *reply);
  return result;
}

absl::Status Session::Rejoin() { return RejoinBy(absl::InfiniteFuture()); }

absl::Status Session::RejoinBy(absl::Time deadline) {
  const Operation operation(*calls_);
  DrainQueue();  // what it pushed belongs to the step that is given up
  const auto timeout = [&] {
    return std::max(std::min(options_.call_timeout, deadline - SteadyNow()), kShortestCall);
  };
  v1::RegisterReply first;
  MUOND_RETURN_IF_ERROR(RegisterWith(daemons_->home(), timeout(), &first).status);
  told_ = std::max(told_, first.position().generation());
  MUOND_RETURN_IF_ERROR(daemons_->Adopt(first));
  std::vector<v1::RegisterReply> replies(daemons_->count());
  const CallResult others = daemons_->ForEach(
      [&](int daemon, Connection&) {
        return RegisterWith(daemon, timeout(), &replies[daemon]);
      },
      /*but_home=*/true);
  MUOND_RETURN_IF_ERROR(others.status);
  replies[daemons_->home()] = std::move(first);
  MUOND_RETURN_IF_ERROR(Adopt(replies));
  return AttachGpus();
}

// FAILED_PRECONDITION unless all daemons see the same run on the same daemons.
absl::Status Session::CheckAlike(const std::vector<v1::RegisterReply>& replies) const {
  const v1::RegisterReply& home = replies[daemons_->home()];
  for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
    const v1::RegisterReply& reply = replies[daemon];
    const std::string pair =
        absl::StrFormat("run \"%s\": register: daemons \"%s\" and \"%s\"", spec_.name,
                        (*daemons_)[daemons_->home()].peer(), (*daemons_)[daemon].peer());
    if (!SameDaemons(home, reply) || (daemons_->count() > 1 && reply.daemon() != daemon)) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s have different lists of peers: start all with one list in one order", pair));
    }
    if (reply.devices() != home.devices()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s have %d and %d devices: a run needs equally many on every daemon "
                          "(--devices)",
                          pair, home.devices(), reply.devices()));
    }
    if (reply.plan_hash() != home.plan_hash()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s have different plans (%s and %s): they must run one version with one list of peers",
          pair, home.plan_hash(), reply.plan_hash()));
    }
  }
  return absl::OkStatus();
}

// Whether the daemons can take a step together.
void Session::CompareStates(const std::vector<v1::RegisterReply>& replies) {
  const v1::RunPosition& home = replies[daemons_->home()].position();
  one_generation_ = true;
  mixed_ = absl::OkStatus();
  for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
    const v1::RunPosition& position = replies[daemon].position();
    one_generation_ = one_generation_ && position.generation() == home.generation();
    if (position.lineage() == home.lineage()) continue;
    mixed_ = absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": the daemons' states don't belong together: daemon \"%s\" has that of "
        "generation %d, daemon \"%s\" that of generation %d (0: none): re-initialize the run from "
        "the trainers' parameters, or restore a checkpoint on all",
        spec_.name, (*daemons_)[daemons_->home()].peer(), home.lineage(),
        (*daemons_)[daemon].peer(), position.lineage()));
  }
}

absl::Status Session::Adopt(const std::vector<v1::RegisterReply>& replies) {
  MUOND_RETURN_IF_ERROR(CheckAlike(replies));
  CompareStates(replies);
  const v1::RegisterReply& home = replies[daemons_->home()];
  MUOND_ASSIGN_OR_RETURN(OwnerTable owners, OwnerTable::Make(spec_, home));
  owners_ = std::make_unique<OwnerTable>(std::move(owners));
  registered_ = home;
  spec_.additions.assign(home.additions().begin(), home.additions().end());
  // A daemon that has not consumed the last step yet will, by the votes of all.
  const v1::RegisterReply* at = &home;
  generation_ = 0;
  for (const v1::RegisterReply& reply : replies) {
    if (reply.position().next_step() < at->position().next_step()) at = &reply;
    generation_ = std::max(generation_, reply.position().generation());
  }
  *registered_.mutable_position() = at->position();
  for (const v1::RegisterReply& reply : replies) {
    if (reply.position().state() != v1::RUN_STATE_NEEDS_RESTORE) continue;
    *registered_.mutable_position() = reply.position();
  }
  const v1::RunPosition& position = registered_.position();
  next_step_ = position.state() == v1::RUN_STATE_NEEDS_RESTORE ? position.resume_step()
                                                              : position.next_step();
  last_outcome_.reset();
  if (position.has_last_outcome()) last_outcome_ = FromProto(position.last_outcome());
  // The scale of a daemon that stands elsewhere is another step's.
  loss_scale_ = at->loss_scale();
  for (const v1::RegisterReply& reply : replies) {
    if (reply.position().next_step() == next_step_) loss_scale_ = reply.loss_scale();
  }
  step_ = -1;
  return absl::OkStatus();
}

absl::Status Session::RaiseOnce(v1::RaiseGenerationRequest request) {
  v1::RaiseGenerationReply reply;
  const int home = daemons_->home();
  absl::Status answer;  // the daemon's last: it names who is missing
  CallResult result = CallWithRetries(
      Plan(home, "raise the generation", options_.call_timeout), [&](const Attempt& attempt) {
        request.set_wait_ms(WaitMs(attempt.deadline));
        CallResult once =
            CallOnce((*daemons_)[home].control(), &v1::Optimizer::Stub::RaiseGeneration, request,
                     &reply, attempt);
        if (absl::IsUnavailable(once.status)) answer = once.status;
        return once;
      });
  // A last try had no time left for an answer.
  if (absl::IsDeadlineExceeded(result.status) && !answer.ok()) result.status = answer;
  return result.status;
}

absl::Status Session::AwaitRestore(absl::Duration timeout) {
  const Operation operation(*calls_);
  const absl::Time deadline = SteadyNow() + timeout;
  absl::BitGen random;
  for (int attempt = 1;; ++attempt) {
    absl::Status joined = RejoinBy(deadline);
    // A daemon that is still coming back can't be asked yet.
    if (!joined.ok() && !absl::IsUnavailable(joined) && !absl::IsDeadlineExceeded(joined)) {
      return joined;
    }
    if (joined.ok() && state() != v1::RUN_STATE_NEEDS_RESTORE) return absl::OkStatus();
    if (SteadyNow() >= deadline) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "run \"%s\": restore: %s", spec_.name,
          joined.ok() ? "its state was not restored in time" : joined.message()));
    }
    CallScope::Sleep(std::min(BackoffDelay(attempt, random), deadline - SteadyNow()));
  }
}

absl::Status Session::RaiseGeneration(const std::string& reason) {
  const Operation operation(*calls_);
  v1::RaiseGenerationRequest request;
  *request.mutable_id() = Id();
  request.set_reason(reason);
  MUOND_RETURN_IF_ERROR(RaiseOnce(std::move(request)));
  return Rejoin();
}

absl::StatusOr<bool> Session::Reinitialize(std::span<const SliceSource> values,
                                           const std::string& reason) {
  const Operation operation(*calls_);
  MUOND_RETURN_IF_ERROR(table_->Check("initialize", values, 1));
  const std::int64_t seen = generation_;
  constexpr int kPatience = 8;  // looks
  const absl::Time deadline = SteadyNow() + options_.call_timeout;
  absl::BitGen random;
  for (int looks = 1;; ++looks) {
    MUOND_RETURN_IF_ERROR(Rejoin());
    const bool anew =
        state() == v1::RUN_STATE_OPENING || registered_.position().lineage() > seen;
    // Another rank may have raised it for all: then only the values are missing.
    if (anew && one_generation_ && mixed_.ok()) return Initialize(values);
    absl::Status raised;
    // While the daemons are in two generations another rank is raising it, and would have its state
    // wiped; only one that has died half way needs help.
    if (one_generation_ || looks % kPatience == 0) {
      v1::RaiseGenerationRequest request;
      *request.mutable_id() = Id();
      request.set_reinitialize(true);
      request.set_reason(reason);
      raised = RaiseOnce(std::move(request));
    }
    // Of ranks that want it at a time one has it; the others are refused and look again.
    if (!raised.ok() && !absl::IsFailedPrecondition(raised)) return raised;
    if (SteadyNow() >= deadline) {
      return !raised.ok() ? raised
                          : absl::DeadlineExceededError(absl::StrFormat(
                                "run \"%s\": reinitialize: the daemons do not come to one state",
                                spec_.name));
    }
    if (!raised.ok() || !one_generation_) {
      CallScope::Sleep(BackoffDelay(std::min(looks, 5), random));
    }
  }
}

absl::StatusOr<bool> Session::Close() {
  const Operation operation(*calls_);
  DrainQueue();
  v1::CloseRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  std::vector<v1::CloseReply> replies(daemons_->count());
  const CallResult result = daemons_->ForEach([&](int daemon, Connection& connection) {
    bool repeated = false;
    CallResult closed = CallWithRetries(
        Plan(daemon, "close", options_.call_timeout), [&](const Attempt& attempt) {
          repeated = attempt.number > 1;
          return CallOnce(connection.control(), &v1::Optimizer::Stub::Close, request,
                          &replies[daemon], attempt);
        });
    // The first attempt's reply was lost: the run that is not there is the one it closed.
    if (repeated && absl::IsNotFound(closed.status)) {
      replies[daemon].set_closed(true);
      closed = {};
    }
    return closed;
  });
  MUOND_RETURN_IF_ERROR(result.status);
  return std::all_of(replies.begin(), replies.end(),
                     [](const v1::CloseReply& reply) { return reply.closed(); });
}

v1::RunId Session::Id() const {
  v1::RunId id;
  id.set_run(spec_.name);
  id.set_generation(generation_);
  return id;
}

std::int64_t Session::ChunkBytes() const {
  const std::int64_t limit = registered_.max_chunk_bytes();
  return limit > 0 ? std::min(options_.chunk_bytes, limit) : options_.chunk_bytes;
}

RetryPlan Session::Plan(int daemon, const std::string& action, absl::Duration timeout) const {
  return {.what = absl::StrFormat("run \"%s\": %s", spec_.name, action),
          .peer = (*daemons_)[daemon].peer(),
          .kind = CallKind::kControl,
          .timeout = timeout,
          .generation = generation_,
          .pause =
              [connection = &(*daemons_)[daemon]](absl::Duration delay) {
                connection->Pause(delay);
              }};
}

}  // namespace muond::client
