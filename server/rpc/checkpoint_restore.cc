#include "server/rpc/answer.h"
#include "server/rpc/checkpoint_service.h"

namespace muond {

grpc::ServerUnaryReactor* CheckpointService::Restore(grpc::CallbackServerContext* context,
                                                     const v1::RestoreRequest* request,
                                                     v1::RestoreReply* reply) {
  const auto run = Find(*context, request->run(), request->if_generation() == 0);
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  checkpointer_->Restore(
      *run, *request,
      [context, reactor, reply, run = *run](const absl::StatusOr<v1::RestoreReply>& done) {
        if (done.ok()) *reply = *done;
        if (done.ok()) *reply->mutable_position() = ToProto(run->Position());
        reactor->Finish(Answer(context, done.status(), run.get()));
      });
  return reactor;
}

}  // namespace muond
