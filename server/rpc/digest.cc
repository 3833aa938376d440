#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {

grpc::ServerUnaryReactor* OptimizerService::Digest(grpc::CallbackServerContext* context,
                                                   const v1::DigestRequest* request,
                                                   v1::DigestReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  (*run)->Digest(request->per_parameter(),
                 [context, reactor, reply, run = *run](absl::StatusOr<DigestSnapshot> digest) {
                   if (digest.ok()) {
                     reply->set_tensor_digest(digest->tensor);
                     reply->set_control_digest(digest->control);
                     reply->set_version(digest->version);
                     for (auto& [name, value] : digest->parameters)
                       (*reply->mutable_parameters())[name] = value;
                   }
                   reactor->Finish(Answer(context, digest.status(), run.get()));
                 });
  return reactor;
}

}  // namespace muond
