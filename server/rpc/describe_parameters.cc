#include "proto/convert.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

void Fill(const ParameterSnapshot& parameter, const std::string& owner,
          v1::ParameterState* message) {
  *message->mutable_parameter() = ToProto(parameter.spec);
  *message->mutable_routed() =
      ToProto(parameter.routed, parameter.spec.group, parameter.tied_to, owner);
  message->set_t(parameter.t);
  message->set_momentum_norm(parameter.momentum_norm);
  message->set_weight_norm(parameter.weight_norm);
  message->set_nonfinite_elements(parameter.nonfinite_elements);
  *message->mutable_hyperparameters() = ToProto(parameter.hyperparameters);
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::DescribeParameters(
    grpc::CallbackServerContext* context, const v1::DescribeParametersRequest* request,
    v1::DescribeParametersReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  (*run)->Describe({request->names().begin(), request->names().end()},
                   [context, reactor, reply, run = *run, owner = context_.daemon_name](
                       absl::StatusOr<std::vector<ParameterSnapshot>> parameters) {
                     if (parameters.ok()) {
                       for (const auto& parameter : *parameters) {
                         Fill(parameter, owner, reply->add_parameters());
                       }
                     }
                     reactor->Finish(Answer(context, parameters.status(), run.get()));
                   });
  return reactor;
}

}  // namespace muond
