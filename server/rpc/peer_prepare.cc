#include "server/cluster/vote_message.h"
#include "server/rpc/answer.h"
#include "server/rpc/peer_service.h"

namespace muond {

grpc::ServerUnaryReactor* PeerService::Prepare(grpc::CallbackServerContext* context,
                                               const v1::PrepareRequest* request,
                                               v1::PrepareReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  const auto promise = (*run)->Prepare(request->generation(), request->reinitialize(),
                                       request->recover());
  if (!promise.ok()) return AnswerNow(context, promise.status(), run->get());
  reply->set_next_step(promise->next_step);
  reply->set_lineage(promise->lineage);
  VotesToProto(promise->votes, reply->mutable_votes());
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
