#include "server/cluster/vote_message.h"
#include "server/rpc/answer.h"
#include "server/rpc/peer_service.h"

namespace muond {

grpc::ServerUnaryReactor* PeerService::Prepare(grpc::CallbackServerContext* context,
                                               const v1::PrepareRequest* request,
                                               v1::PrepareReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  const auto promise = (*run)->Prepare(
      request->generation(), {.current = request->seen(),
                              .reinitialize = request->reinitialize(),
                              .unless_made_anew = request->seen() > 0,
                              .adopt = request->adopt()});
  if (!promise.ok()) return AnswerNow(context, promise.status(), run->get());
  reply->set_next_step(promise->steps.next_step);
  reply->set_lineage(promise->steps.lineage);
  reply->set_additions(promise->additions);
  reply->set_adopted(promise->adopted);
  VotesToProto(promise->steps.votes, reply->mutable_votes());
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
