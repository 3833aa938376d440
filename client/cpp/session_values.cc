// Parameters on their way in and out, and the paths that they take.
#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_format.h"
#include "client/cpp/arena.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/owner_table.h"
#include "client/cpp/pair.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/push_queue.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/recovery.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/steady_time.h"

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
  path.name = reply.transport().empty() ? "grpc" : reply.transport();
  path.reason = reply.transport_reason();
  if (path.name != "cuda-ipc") path.gpu = nullptr;
  if (path.name != "nccl") path.pair = nullptr;
  if (path.name != "arena") {
    path.arena = nullptr;
    return absl::OkStatus();  // of "cuda-ipc" the rest comes when it is known who owns what
  }
  if (path.arena != nullptr && !path.arena->lost()) return absl::OkStatus();
  path.arena = nullptr;
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
  const absl::Time deadline = SteadyNow() + options_.call_timeout;
  auto arena = ArenaLink::Attach(connection.control(), request, deadline, &handle);
  if (arena.ok()) {
    connection.path().arena = *std::move(arena);
    return absl::OkStatus();
  }
  if (CallScope::CurrentIsOver()) return arena.status();  // says nothing about the path
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
  connection.path().name = "grpc";
  connection.path().reason = std::string(arena.status().message());
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

void Session::Cancel() { queue_->Cancel(); }

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
  const auto send = [&](int daemon, Connection&) {
    bool complete = false;
    CallResult result =
        SendParts(daemon, "initialize", PartsFor(daemon, values), /*initial=*/true, &complete);
    replies[daemon].set_complete(complete);
    return result;
  };
  const absl::Time start = SteadyNow();
  CallResult result;
  for (int tries = 1;; ++tries) {
    result = daemons_->ForEach(send);
    // Daemons that have restarted may be raising the generation.
    const bool elsewhere = !result.status.ok() && result.position.has_value() &&
                           result.position->generation() != generation_;
    if (!elsewhere || SteadyNow() - start > options_.call_timeout) break;
    absl::BitGen random;
    CallScope::Sleep(BackoffDelay(tries, random));
    MUOND_RETURN_IF_ERROR(Rejoin());
    MUOND_RETURN_IF_ERROR(mixed_);
  }
  MUOND_RETURN_IF_ERROR(result.status);
  return std::all_of(replies.begin(), replies.end(),
                     [](const v1::InitializeReply& reply) { return reply.complete(); });
}

CallResult Session::PullOnce(std::int64_t version, std::span<const SliceSink> sinks,
                             bool master) {
  const std::string action = absl::StrFormat("pull of version %d", version);
  return daemons_->ForEach([&](int daemon, Connection&) {
    return PullParts(daemon, action, version, SinksFor(daemon, sinks), master);
  });
}

absl::Status Session::Pull(std::int64_t version, std::span<const SliceSink> sinks, bool master) {
  const Operation operation(*calls_);
  MUOND_RETURN_IF_ERROR(table_->Check(sinks, master));
  DrainQueue();
  Recovery recovery(*this, absl::StrFormat("pull of version %d", version));
  for (;;) {
    const std::int64_t generation = generation_;
    const CallResult result = PullOnce(version, sinks, master);
    if (result.status.ok()) {
      recovery.Done();
      return result.status;
    }
    MUOND_RETURN_IF_ERROR(recovery.After(result, generation));
    if (next_step_ == version) continue;
    return recovery.GiveUp(absl::AbortedError(absl::StrFormat(
        "run \"%s\": pull of version %d: the run stands before step %d of generation %d now; "
        "pull version %d and go on from there (%s)",
        spec_.name, version, next_step_, generation_, next_step_, result.status.message())));
  }
}

}  // namespace muond::client
