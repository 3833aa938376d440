#include "server/rpc/admin_service.h"
#include "server/rpc/answer.h"
#include "spdlog/spdlog.h"

namespace muond {

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context,
                                              const v1::DrainRequest* request,
                                              v1::DrainReply* reply) {
  const bool drain = !request->cancel();
  const bool changed = context_.runs->RefuseNew(drain);
  context_.set_ready(!drain);
  reply->set_draining(drain);
  for (const auto& run : context_.runs->All()) reply->add_open_runs(run->name());
  if (changed) {
    spdlog::info("drain: an operator {}; {} runs are open",
                 drain ? "wants no new runs" : "allows new runs again", reply->open_runs_size());
  }
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
