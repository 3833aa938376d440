#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"
#include "spdlog/spdlog.h"

namespace muond {

grpc::ServerUnaryReactor* OptimizerService::Close(grpc::CallbackServerContext* context,
                                                  const v1::CloseRequest* request,
                                                  v1::CloseReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  std::vector<std::int64_t> open_ranks;
  const auto last = (*run)->Leave(request->rank(), request->id().generation(), open_ranks);
  if (!last.ok()) return AnswerNow(context, last.status(), run->get());
  for (std::int64_t rank : open_ranks) reply->add_open_ranks(rank);
  reply->set_closed(*last);
  context_.arenas->Close({(*run)->name(), request->rank()});
  context_.pairs->Close({(*run)->name(), request->rank()},
                        absl::CancelledError("the rank has left the run"));
  if (*last) {
    context_.runs->Remove(*run);
    spdlog::info("run \"{}\": closed", (*run)->name());
  }
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
