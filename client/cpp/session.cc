// Joining and leaving a run, and its parameters on the way in and out; session_step.cc has the
// steps.
#include "client/cpp/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/cpp/connection.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/retry.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::client {
namespace {

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
  constexpr std::int64_t kMin = 1024;
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // far below protobuf's 2 GiB
  if (options.chunk_bytes < kMin || options.chunk_bytes > kMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("session options: chunk_bytes: expected %d to %d, got %d", kMin, kMax,
                        options.chunk_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

Session::Session() = default;
Session::~Session() = default;

absl::StatusOr<std::unique_ptr<Session>> Session::Open(const RunSpec& spec, std::int64_t rank,
                                                       const RankSlices& slices,
                                                       const SessionOptions& options) {
  MUOND_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<Session> session(new Session());
  MUOND_ASSIGN_OR_RETURN(
      session->connection_,
      Connection::Open(options.endpoint, options.channel, options.chunk_bytes));
  session->options_ = options;
  session->spec_ = spec;
  session->slices_ = slices;
  session->rank_ = rank;
  session->table_ = std::make_unique<SliceTable>(session->spec_, rank, session->slices_);
  MUOND_RETURN_IF_ERROR(session->Rejoin());
  return session;
}

absl::Status Session::Rejoin() {
  v1::RegisterRequest request;
  *request.mutable_run() = ToProto(spec_);
  request.set_rank(rank_);
  request.set_session(options_.session);
  SlicesToProto(slices_, request.mutable_slices());
  request.set_client(kClientName);
  v1::RegisterReply reply;
  const CallResult result = CallWithRetries(
      Plan("register", options_.call_timeout), [&](const Attempt& attempt) {
        return CallOnce(connection_->control(), &v1::Optimizer::Stub::Register, request, &reply,
                        attempt.deadline);
      });
  MUOND_RETURN_IF_ERROR(result.status);
  registered_ = std::move(reply);
  Adopt(registered_.position());
  loss_scale_ = registered_.loss_scale();
  step_ = -1;
  return absl::OkStatus();
}

void Session::Adopt(const v1::RunPosition& position) {
  generation_ = position.generation();
  next_step_ = position.next_step();
  last_outcome_.reset();
  if (position.has_last_outcome()) last_outcome_ = FromProto(position.last_outcome());
}

absl::StatusOr<bool> Session::Initialize(std::span<const SliceSource> values) {
  MUOND_RETURN_IF_ERROR(table_->Check("initialize", values, 1));
  const PushJob job{connection_->bulk(), Id(), rank_, values, ChunkBytes()};
  RetryPlan plan = Plan("initialize", options_.bulk_timeout);
  plan.kind = CallKind::kStream;
  v1::InitializeReply reply;
  const CallResult result = CallWithRetries(plan, [&](const Attempt& attempt) {
    return SendInitialize(job, attempt.deadline, &reply);
  });
  MUOND_RETURN_IF_ERROR(result.status);
  return reply.complete();
}

absl::Status Session::Pull(std::int64_t version, std::span<const SliceSink> sinks, bool master) {
  MUOND_RETURN_IF_ERROR(table_->Check(sinks, master));
  const PullJob job{connection_->bulk(), Id(),   rank_,       version, sinks,
                    table_.get(),        master, ChunkBytes()};
  RetryPlan plan =
      Plan(absl::StrFormat("pull of version %d", version), options_.bulk_timeout);
  plan.kind = CallKind::kStream;
  return CallWithRetries(plan, [&](const Attempt& attempt) {
           return ReceivePull(job, attempt.deadline);
         }).status;
}

absl::StatusOr<bool> Session::Close() {
  v1::CloseRequest request;
  *request.mutable_id() = Id();
  request.set_rank(rank_);
  v1::CloseReply reply;
  bool repeated = false;
  const CallResult result =
      CallWithRetries(Plan("close", options_.call_timeout), [&](const Attempt& attempt) {
        repeated = attempt.number > 1;
        return CallOnce(connection_->control(), &v1::Optimizer::Stub::Close, request, &reply,
                        attempt.deadline);
      });
  // The first attempt's reply was lost: the run that is not there is the one it closed.
  if (repeated && absl::IsNotFound(result.status)) return true;
  MUOND_RETURN_IF_ERROR(result.status);
  return reply.closed();
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

RetryPlan Session::Plan(const std::string& action, absl::Duration timeout) const {
  return {.what = absl::StrFormat("run \"%s\": %s", spec_.name, action),
          .peer = connection_->peer(),
          .kind = CallKind::kControl,
          .timeout = timeout,
          .generation = generation_};
}

}  // namespace muond::client
