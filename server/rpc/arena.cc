// OpenArena and CloseArena.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/check.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

absl::Status CheckMember(const Run& run, std::int64_t rank, std::int64_t generation) {
  const RunSnapshot snapshot = run.Snapshot();
  const auto& ranks = snapshot.ranks_registered;
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": arena of rank %d: it has not registered", run.name(), rank));
  }
  if (generation != snapshot.position.generation) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": arena of rank %d: expected generation %d, got %d", run.name(),
                        rank, snapshot.position.generation, generation));
  }
  return absl::OkStatus();
}

absl::Status Open(const RpcContext& context, const Run& run, const v1::OpenArenaRequest& request,
                  v1::OpenArenaReply* reply) {
  if (context.arena_socket.empty()) {
    return absl::FailedPreconditionError(absl::StrFormat("run \"%s\": arena of rank %d: %s",
                                                         run.name(), request.rank(),
                                                         context.why_no_arenas));
  }
  MUOND_RETURN_IF_ERROR(CheckMember(run, request.rank(), request.id().generation()));
  auto arena = context.arenas->Open({run.name(), request.rank()},
                                    {request.window_bytes(), request.windows()}, absl::Now());
  if (!arena.ok()) {
    context.metrics->OnTransportError(TransportPath::kArena, TransportError::kNoMemory);
    return arena.status();
  }
  reply->set_handle((*arena)->handle());
  reply->set_socket(context.arena_socket);
  reply->set_bytes((*arena)->layout().bytes);
  for (const ArenaWindow& window : (*arena)->layout().windows) {
    v1::ArenaWindow* message = reply->add_windows();
    message->set_offset(window.offset);
    message->set_bytes(window.bytes);
    message->set_filled(window.filled);
    message->set_drained(window.drained);
    message->set_to_daemon(window.to_daemon);
  }
  return absl::OkStatus();
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::OpenArena(grpc::CallbackServerContext* context,
                                                      const v1::OpenArenaRequest* request,
                                                      v1::OpenArenaReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  return AnswerNow(context, Open(context_, **run, *request, reply), run->get());
}

grpc::ServerUnaryReactor* OptimizerService::CloseArena(grpc::CallbackServerContext* context,
                                                       const v1::CloseArenaRequest* request,
                                                       v1::CloseArenaReply*) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  if (!request->handle().empty()) {
    context_.arenas->CloseHandle(request->handle(), {(*run)->name(), request->rank()});
  }
  if (!request->fallback().empty()) {
    context_.metrics->OnTransportFallback(request->handle().empty()
                                              ? TransportFallback::kRefused
                                              : TransportFallback::kNotAttached);
    spdlog::warn("run \"{}\": rank {} goes on over gRPC, without an arena: {}", (*run)->name(),
                 request->rank(), request->fallback().substr(0, 200));
  }
  return AnswerNow(context, absl::OkStatus(), run->get());
}

}  // namespace muond
