#include "server/rpc/answer.h"
#include "server/rpc/peer_service.h"
#include "server/run/shard_hashes_message.h"

namespace muond {

grpc::ServerUnaryReactor* PeerService::StateHashes(grpc::CallbackServerContext* context,
                                                   const v1::StateHashesRequest* request,
                                                   v1::StateHashesReply* reply) {
  const auto run = Find(request->peer(), /*exact=*/true);
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  (*run)->HashShards(request->version(),
                     [context, reactor, reply,
                      run = *run](const absl::StatusOr<std::vector<ShardHashes>>& hashes) {
                       if (hashes.ok()) AppendToProto(*hashes, reply);
                       reactor->Finish(Answer(context, hashes.status(), run.get()));
                     });
  return reactor;
}

}  // namespace muond
