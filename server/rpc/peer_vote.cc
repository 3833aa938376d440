#include "server/cluster/vote_message.h"
#include "server/rpc/answer.h"
#include "server/rpc/peer_service.h"

namespace muond {

grpc::ServerUnaryReactor* PeerService::Vote(grpc::CallbackServerContext* context,
                                            const v1::VoteRequest* request, v1::VoteReply* reply) {
  const auto run = Find(request->peer());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  const auto votes = VotesFromProto(request->votes());
  if (!votes.ok()) return AnswerNow(context, votes.status(), run->get());
  // A vote that comes too early or too late is no error between daemons: the position tells, and
  // the caller asks again.
  const absl::Status taken = (*run)->OnVotes(*votes);
  if (absl::IsAlreadyExists(taken) || absl::IsInvalidArgument(taken)) {
    return AnswerNow(context, taken, run->get());
  }
  *reply->mutable_position() = ToProto((*run)->Position());
  VotesToProto((*run)->VotesOf(request->step()), reply->mutable_votes());
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
