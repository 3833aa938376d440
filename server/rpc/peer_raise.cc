#include "server/cluster/vote_message.h"
#include "server/rpc/answer.h"
#include "server/rpc/peer_service.h"

namespace muond {

grpc::ServerUnaryReactor* PeerService::Raise(grpc::CallbackServerContext* context,
                                             const v1::RaiseRequest* request,
                                             v1::RaiseReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  auto settled = VotesFromProto(request->settled());
  if (!settled.ok()) return AnswerNow(context, settled.status(), run->get());
  const absl::Status raised = (*run)->Raise({.generation = request->generation(),
                                             .settled = *std::move(settled),
                                             .reinitialize = request->reinitialize(),
                                             .resume_step = request->resume_step(),
                                             .restore = request->restore(),
                                             .adopt = request->adopt()});
  if (!raised.ok()) return AnswerNow(context, raised, run->get());
  *reply->mutable_position() = ToProto((*run)->Position());
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
