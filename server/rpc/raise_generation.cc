#include <algorithm>

#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {

grpc::ServerUnaryReactor* OptimizerService::RaiseGeneration(
    grpc::CallbackServerContext* context, const v1::RaiseGenerationRequest* request,
    v1::RaiseGenerationReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  constexpr absl::Duration kWaitMax = absl::Seconds(10);
  const absl::Duration wait = request->wait_ms() > 0
                                  ? std::min(absl::Milliseconds(request->wait_ms()), kWaitMax)
                                  : kWaitMax;
  const RaiseWish wish{.current = request->id().generation(),
                       .reinitialize = request->reinitialize(),
                       .unless_made_anew = request->reinitialize(),
                       .adopt = request->adopt()};
  (*run)->RaiseOnAll(wish, request->reason(), wait,
                     [context, reactor, reply, run = *run](const absl::Status& status) {
                       if (status.ok()) *reply->mutable_position() = ToProto(run->Position());
                       reactor->Finish(Answer(context, status, run.get()));
                     });
  return reactor;
}

}  // namespace muond
