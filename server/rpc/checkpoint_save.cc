#include "server/rpc/answer.h"
#include "server/rpc/checkpoint_service.h"

namespace muond {

grpc::ServerUnaryReactor* CheckpointService::Save(grpc::CallbackServerContext* context,
                                                  const v1::SaveRequest* request,
                                                  v1::SaveReply* reply) {
  const auto run = Find(*context, request->run(), true);
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  checkpointer_->Save(
      *run, *request,
      [context, reactor, reply, run = *run](const absl::StatusOr<v1::SaveReply>& done) {
        if (done.ok()) *reply = *done;
        reactor->Finish(Answer(context, done.status(), run.get()));
      });
  return reactor;
}

}  // namespace muond
