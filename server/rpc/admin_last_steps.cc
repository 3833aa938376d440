#include "server/rpc/admin_service.h"
#include "server/rpc/answer.h"

namespace muond {

grpc::ServerUnaryReactor* AdminService::LastSteps(grpc::CallbackServerContext* context,
                                                  const v1::LastStepsRequest* request,
                                                  v1::LastStepsReply* reply) {
  if (!request->run().empty()) {
    const auto run = context_.runs->Find(request->run());
    if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  }
  for (const StepEvent& event : context_.events->Last(request->run())) {
    *reply->add_steps() = ToProto(event);
  }
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
