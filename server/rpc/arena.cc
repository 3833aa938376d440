// OpenArena and CloseArena.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

absl::Status Open(const RpcContext& context, const Run& run, const v1::OpenArenaRequest& request,
                  v1::OpenArenaReply* reply) {
  if (context.arena_socket.empty()) {
    return absl::FailedPreconditionError(absl::StrFormat("run \"%s\": arena of rank %d: %s",
                                                         run.name(), request.rank(),
                                                         context.why_no_arenas));
  }
  MUOND_RETURN_IF_ERROR(CheckMember(run, "arena", request.rank(), request.id().generation()));
  ArenaSize size{.window_bytes = request.window_bytes(),
                 .windows = request.windows(),
                 .pull_bytes = request.pull_bytes()};
  if (!request.gpu().empty()) {
    const auto gpu = std::find_if(context.gpus.begin(), context.gpus.end(),
                                  [&](const auto* g) { return g->uuid() == request.gpu(); });
    if (gpu == context.gpus.end()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("run \"%s\": arena of rank %d: the daemon has no GPU \"%s\"", run.name(),
                          request.rank(), request.gpu()));
    }
    size.gpu = *gpu;
  }
  auto arena = context.arenas->Open({run.name(), request.rank()}, size, SteadyNow());
  if (!arena.ok()) {
    context.metrics->OnTransportError(
        size.gpu == nullptr ? TransportPath::kArena : TransportPath::kCudaIpc,
        TransportError::kNoMemory);
    return arena.status();
  }
  if (size.gpu != nullptr) {
    reply->set_gpu(request.gpu());
    reply->set_gpu_bytes((*arena)->layout().gpu_bytes);
    reply->set_gpu_handle((*arena)->layout().gpu_handle);
    reply->set_gpu_handle_bytes(kernels::kSharedHandleBytes);
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
    context_.metrics->OnTransportFallback(
        request->handle().empty() ? TransportFallback::kRefused : TransportFallback::kNotAttached,
        request->gpu() ? TransportPath::kCudaIpc : TransportPath::kArena);
    spdlog::warn("run \"{}\": rank {} goes on over gRPC, without an arena: {}", (*run)->name(),
                 request->rank(), request->fallback().substr(0, 200));
  }
  return AnswerNow(context, absl::OkStatus(), run->get());
}

}  // namespace muond
