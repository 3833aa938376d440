#include "server/rpc/answer.h"
#include "server/rpc/checkpoint_service.h"

namespace muond {

grpc::ServerUnaryReactor* CheckpointPeerService::SavePart(grpc::CallbackServerContext* context,
                                                          const v1::SavePartRequest* request,
                                                          v1::SavePartReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  checkpointer_->SavePart(
      *run, *request,
      [context, reactor, reply, run = *run](const absl::StatusOr<v1::SavePartReply>& done) {
        if (done.ok()) *reply = *done;
        reactor->Finish(Answer(context, done.status(), run.get()));
      });
  return reactor;
}

}  // namespace muond
