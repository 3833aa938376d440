// Parameters on their way in and out, and the paths that they take.
#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/owner_table.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/push_queue.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"

namespace muond::client {

std::vector<ChosenTransport> Session::transports() const {
  std::vector<ChosenTransport> chosen;
  for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
    Connection& connection = (*daemons_)[daemon];
    chosen.push_back({connection.peer(), connection.path().name, connection.path().reason});
  }
  return chosen;
}

absl::Status Session::ChoosePath(int daemon, const v1::RegisterReply& reply) {
  Connection::Path& path = (*daemons_)[daemon].path();
  if (reply.transport() != "arena") {
    path = {reply.transport().empty() ? "grpc" : reply.transport(), reply.transport_reason(),
            nullptr};
    return absl::OkStatus();
  }
  if (path.arena != nullptr && !path.arena->lost()) return absl::OkStatus();
  path = {"arena", reply.transport_reason(), nullptr};
  return AttachArena(daemon, reply.position().generation());
}

absl::Status Session::AttachArena(int daemon, std::int64_t generation) {
  Connection& connection = (*daemons_)[daemon];
  ArenaRequest request{.rank = rank_,
                       .window_bytes = options_.arena_window_bytes,
                       .windows = options_.arena_windows,
                       .socket = connection.arena_socket()};
  request.id.set_run(spec_.name);
  request.id.set_generation(generation);
  std::string handle;
  const absl::Time deadline = absl::Now() + options_.call_timeout;
  auto arena = ArenaLink::Attach(connection.control(), request, deadline, &handle);
  if (arena.ok()) {
    connection.path().arena = *std::move(arena);
    return absl::OkStatus();
  }
  v1::CloseArenaRequest close;
  *close.mutable_id() = request.id;
  close.set_rank(rank_);
  close.set_handle(handle);
  close.set_fallback(std::string(arena.status().message()));
  v1::CloseArenaReply closed;
  // The daemon counts it. Should this fail, it notices by itself that nobody comes for the arena.
  CallOnce(connection.control(), &v1::Optimizer::Stub::CloseArena, close, &closed, deadline)
      .status.IgnoreError();
  if (options_.transport == "arena") {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": transport \"arena\": %s", spec_.name, arena.status().message()));
  }
  connection.path() = {"grpc", std::string(arena.status().message()), nullptr};
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ArenaLink>> Session::ArenaOf(int daemon) {
  Connection::Path& path = (*daemons_)[daemon].path();
  if (path.arena == nullptr || !path.arena->lost()) return path.arena;
  path.arena = nullptr;
  MUOND_RETURN_IF_ERROR(AttachArena(daemon, generation_));
  return path.arena;
}

CallResult Session::DrainQueue() { return queue_->Drain(); }

void Session::Cancel() {
  calls_->CancelInner();
  queue_->CancelQueued();
}

std::vector<SlicePart> Session::PartsFor(int daemon, std::span<const SliceSource> sources) const {
  std::vector<SlicePart> parts;
  for (const SliceSource& source : sources) {
    const Box& box = table_->BoxOf(source.parameter, source.slice);
    std::vector<ElementRange> ranges = owners_->Owned(daemon, source.parameter, box);
    if (!ranges.empty()) parts.push_back({&source, std::move(ranges)});
  }
  return parts;
}

absl::StatusOr<bool> Session::Initialize(std::span<const SliceSource> values) {
  const Operation operation(*calls_);
  MUOND_RETURN_IF_ERROR(table_->Check("initialize", values, 1));
  DrainQueue();
  std::vector<v1::InitializeReply> replies(daemons_->count());
  const auto send = [&](int daemon, Connection& connection) {
    const std::vector<SlicePart> parts = PartsFor(daemon, values);
    RetryPlan plan = Plan(daemon, "initialize", options_.bulk_timeout);
    plan.kind = CallKind::kStream;
    return CallWithRetries(plan, [&](const Attempt& attempt) -> CallResult {
      auto arena = ArenaOf(daemon);
      if (!arena.ok()) return {arena.status(), std::nullopt};
      const PushJob job{connection.bulk(), Id(),         rank_,
                        parts,             ChunkBytes(), *std::move(arena)};
      return SendInitialize(job, attempt.deadline, &replies[daemon]);
    });
  };
  const absl::Time start = absl::Now();
  CallResult result;
  for (int tries = 1;; ++tries) {
    result = daemons_->ForEach(send);
    // Daemons that have restarted may be raising the generation.
    const bool elsewhere = !result.status.ok() && result.position.has_value() &&
                           result.position->generation() != generation_;
    if (!elsewhere || absl::Now() - start > options_.call_timeout) break;
    absl::BitGen random;
    CallScope::Sleep(BackoffDelay(tries, random));
    MUOND_RETURN_IF_ERROR(Rejoin());
    MUOND_RETURN_IF_ERROR(mixed_);
  }
  MUOND_RETURN_IF_ERROR(result.status);
  return std::all_of(replies.begin(), replies.end(),
                     [](const v1::InitializeReply& reply) { return reply.complete(); });
}

absl::Status Session::Pull(std::int64_t version, std::span<const SliceSink> sinks, bool master) {
  const Operation operation(*calls_);
  MUOND_RETURN_IF_ERROR(table_->Check(sinks, master));
  DrainQueue();
  const CallResult result = daemons_->ForEach([&](int daemon, Connection& connection) {
    std::vector<SinkPart> parts;
    for (const SliceSink& sink : sinks) {
      const Box& box = table_->BoxOf(sink.parameter, sink.slice);
      std::vector<ElementRange> ranges = owners_->Owned(daemon, sink.parameter, box);
      if (!ranges.empty()) parts.push_back({&sink, &box, std::move(ranges)});
    }
    RetryPlan plan =
        Plan(daemon, absl::StrFormat("pull of version %d", version), options_.bulk_timeout);
    plan.kind = CallKind::kStream;
    return CallWithRetries(plan, [&](const Attempt& attempt) -> CallResult {
      auto arena = ArenaOf(daemon);
      if (!arena.ok()) return {arena.status(), std::nullopt};
      const PullJob job{connection.bulk(), Id(),   rank_,        version,
                        parts,             master, ChunkBytes(), *std::move(arena)};
      return ReceivePull(job, attempt.deadline);
    });
  });
  return result.status;
}

}  // namespace muond::client
