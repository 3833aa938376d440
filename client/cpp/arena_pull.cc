#include "client/cpp/arena_pull.h"

#include <algorithm>
#include <string_view>

#include "absl/strings/str_format.h"
#include "client/cpp/arena.h"
#include "proto/check.h"
#include "proto/status.h"

namespace muond::client {
namespace {

// Copies everything that a window holds to the sinks.
absl::Status TakeWindow(const ArenaLink& arena, const v1::PullReply& reply,
                        PullAssembly& assembly) {
  const v1::ArenaFill& fill = reply.fill();
  const v1::ArenaWindow* const window = arena.Incoming(fill.window());
  if (window == nullptr ||
      arena.memory().Get(window->filled()) != static_cast<std::uint64_t>(fill.sequence())) {
    return absl::DataLossError(absl::StrFormat(
        "pull: arena: window %d: its fence does not stand at fill %d", fill.window(),
        fill.sequence()));
  }
  for (const v1::Chunk& chunk : fill.chunks()) {
    const std::int64_t offset = chunk.region().offset(), bytes = chunk.region().bytes();
    if (bytes < 0 || bytes > window->bytes() || offset < window->offset() ||
        offset - window->offset() > window->bytes() - bytes) {
      return absl::DataLossError(absl::StrFormat(
          "parameter \"%s\": pull: arena: %d bytes at %d are not inside window %d",
          chunk.parameter(), bytes, offset, fill.window()));
    }
    const std::string_view payload(reinterpret_cast<const char*>(arena.memory().data() + offset),
                                   static_cast<std::size_t>(bytes));
    MUOND_RETURN_IF_ERROR(assembly.Take(reply.version(), chunk, {&payload, 1}));
  }
  return absl::OkStatus();
}

}  // namespace

CallResult ReceiveThroughArena(const PullJob& job, const v1::PullRequest& request,
                               PullAssembly& assembly, grpc::ClientContext& context) {
  const auto stub = v1::Optimizer::NewStub(job.channel);
  const auto stream = stub->PullArena(&context);
  v1::PullArenaRequest message;
  *message.mutable_pull() = request;
  message.mutable_pull()->set_chunk_bytes(
      std::min(request.chunk_bytes(), job.arena->window_bytes()));
  message.set_arena(job.arena->handle());
  stream->Write(message);
  absl::Status taken;
  for (v1::PullReply reply; taken.ok() && stream->Read(&reply);) {
    taken = TakeWindow(*job.arena, reply, assembly);
    if (!taken.ok()) break;
    message.Clear();
    message.set_window(reply.fill().window());
    message.set_sequence(reply.fill().sequence());
    // Fails when the daemon has ended the stream: Finish tells how.
    stream->Write(message);
  }
  if (!taken.ok()) context.TryCancel();
  const grpc::Status status = stream->Finish();
  if (!taken.ok()) return {taken, std::nullopt};
  if (!status.ok()) return {FromGrpc(status), PositionFrom(context)};
  return {assembly.CheckComplete(), std::nullopt};
}

}  // namespace muond::client
