#include "client/cpp/pull_stream.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "client/cpp/arena_pull.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/pull_assembly.h"
#include "grpcpp/client_context.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/sync_stream.h"
#include "proto/check.h"
#include "proto/chunk_message.h"
#include "proto/grpc_deadline.h"
#include "proto/long_turns.h"
#include "proto/status.h"

namespace muond::client {
namespace {

using Reader = grpc::ClientReader<grpc::ByteBuffer>;

constexpr int kChunkFields[] = {v1::PullReply::kChunkFieldNumber,
                                v1::PullReply::kMoreFieldNumber};

absl::Status Take(PullAssembly& assembly, const grpc::ByteBuffer& buffer) {
  v1::PullReply head;
  MUOND_ASSIGN_OR_RETURN(const ChunkMessage message,
                         ChunkMessage::Decode(buffer, kChunkFields, &head));
  for (const ReceivedChunk& chunk : message.chunks()) {
    MUOND_RETURN_IF_ERROR(
        assembly.Take(head.version(), chunk.header, message.Payload(chunk)));
  }
  return absl::OkStatus();
}

}  // namespace

CallResult ReceivePull(const PullJob& job, absl::Time deadline) {
  v1::PullRequest request;
  PullAssembly assembly(job, request);
  if (assembly.empty()) return {};  // an empty list in the request would mean all slices
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  const CallScope::Call scoped(context);
  const LongTurns turns;
  if (job.arena != nullptr) return ReceiveThroughArena(job, request, assembly, context);

  const grpc::internal::RpcMethod rpc("/muond.v1.Optimizer/Pull",
                                      grpc::internal::RpcMethod::SERVER_STREAMING);
  const std::unique_ptr<Reader> reader(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(job.channel.get(), rpc,
                                                                    &context, request));
  absl::Status taken;
  for (grpc::ByteBuffer message; taken.ok() && reader->Read(&message);) {
    taken = Take(assembly, message);
  }
  if (!taken.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!taken.ok()) return {taken, std::nullopt};
  if (!status.ok()) return {FromGrpc(status), PositionFrom(context)};
  return {assembly.CheckComplete(), std::nullopt};
}

}  // namespace muond::client
