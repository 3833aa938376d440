#include "proto/version.h"
#include "server/rpc/answer.h"
#include "server/rpc/peer_service.h"

namespace muond {

grpc::ServerUnaryReactor* PeerService::Hello(grpc::CallbackServerContext* context,
                                             const v1::HelloRequest* request,
                                             v1::HelloReply* reply) {
  const auto run = Find(request->peer(), /*exact=*/true);
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  *reply->mutable_position() = ToProto((*run)->Position());
  reply->set_version(std::string(OwnVersion()));
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
