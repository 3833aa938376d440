#include "proto/convert.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {

grpc::ServerUnaryReactor* OptimizerService::Begin(grpc::CallbackServerContext* context,
                                                  const v1::BeginRequest* request,
                                                  v1::BeginReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  const auto begin = FromProto(*request);
  const absl::Status status =
      begin.ok() ? (*run)->Begin(request->rank(), request->id().generation(), *begin)
                 : begin.status();
  if (status.ok()) *reply->mutable_position() = ToProto((*run)->Position());
  return AnswerNow(context, status, run->get());
}

}  // namespace muond
