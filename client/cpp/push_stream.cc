#include "client/cpp/push_stream.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_format.h"
#include "client/cpp/arena_push.h"
#include "client/cpp/call_scope.h"
#include "grpcpp/client_context.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/sync_stream.h"
#include "proto/chunk_message.h"
#include "proto/convert.h"
#include "proto/grpc_deadline.h"
#include "proto/long_turns.h"
#include "proto/status.h"

namespace muond::client {
namespace {

using Writer = grpc::ClientWriter<grpc::ByteBuffer>;

// Messages below this wait for company, so that many small slices share one write to the socket.
constexpr std::size_t kSmallMessageBytes = std::size_t{64} << 10;

// Writes the slices as messages of type `Message`; `head` is the first one without its chunk.
// Ends early when the stream breaks: its status tells why.
template <typename Message>
void WriteSlices(const PushJob& job, const Message& head, Writer& writer) {
  const Message empty;
  const Message* front = &head;
  for (const SlicePart& part : job.parts) {
    const SliceSource& source = *part.source;
    const auto element_bytes = static_cast<std::int64_t>(DtypeBytes(source.dtype));
    const std::int64_t step = std::max<std::int64_t>(job.chunk_bytes / element_bytes, 1);
    v1::Chunk header;
    header.set_parameter(source.parameter);
    header.set_slice(source.slice);
    header.set_micro_batch(source.micro_batch);
    header.set_dtype(ToProto(source.dtype));
    for (const ElementRange& range : part.ranges) {
      for (std::int64_t at = range.first; at < range.first + range.count; at += step) {
        const std::int64_t count = std::min(step, range.first + range.count - at);
        header.set_offset(at);
        const auto* data = static_cast<const std::byte*>(source.data) + at * element_bytes;
        SentChunk chunk{Message::kChunkFieldNumber, header,
                        CopyToSlice(data, static_cast<std::size_t>(count * element_bytes))};
        const grpc::ByteBuffer message = EncodeChunks(*front, {&chunk, 1});
        // The end of the stream flushes what still waits.
        grpc::WriteOptions options;
        if (message.Length() < kSmallMessageBytes) options.set_buffer_hint();
        if (!writer.Write(message, options)) return;
        front = &empty;
      }
    }
  }
  if (front != &head) return;
  // Nothing to send, but the daemon must learn who opened the stream.
  const grpc::Slice slice(head.SerializeAsString());
  writer.Write(grpc::ByteBuffer(&slice, 1));
}

template <typename Message, typename Reply>
CallResult Send(const PushJob& job, const char* method, const Message& head, absl::Time deadline,
                Reply* reply) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(deadline));
  const CallScope::Call scoped(context);
  reply->Clear();
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::CLIENT_STREAMING);
  const std::unique_ptr<Writer> writer(
      grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(job.channel.get(), rpc,
                                                                    &context, reply));
  {
    const LongTurns turns;
    WriteSlices(job, head, *writer);
  }
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (!status.ok()) return {FromGrpc(status), PositionFrom(context)};
  return {};
}

// Whichever way the slices go, the daemon must have counted as many as were sent.
template <typename Message, typename Reply>
CallResult SendAndCount(const PushJob& job, const char* method, const Message& head,
                        absl::Time deadline, Reply* reply) {
  reply->Clear();
  CallResult result = job.arena != nullptr ? SendThroughArena(job, head, deadline, reply)
                                           : Send(job, method, head, deadline, reply);
  const auto sent = static_cast<std::int64_t>(job.parts.size());
  const std::int64_t taken = reply->slices_accepted() + reply->slices_duplicate();
  if (result.status.ok() && taken != sent) {
    result.status =
        absl::DataLossError(absl::StrFormat("run \"%s\": %s: the daemon took %d of %d slices",
                                            job.id.run(), method, taken, sent));
  }
  return result;
}

}  // namespace

CallResult SendInitialize(const PushJob& job, absl::Time deadline, v1::InitializeReply* reply) {
  v1::InitializeRequest head;
  *head.mutable_id() = job.id;
  head.set_rank(job.rank);
  return SendAndCount(job, "/muond.v1.Optimizer/Initialize", head, deadline, reply);
}

CallResult SendPush(const PushJob& job, std::int64_t step, absl::Time deadline,
                    v1::PushReply* reply) {
  v1::PushRequest head;
  *head.mutable_id() = job.id;
  head.set_rank(job.rank);
  head.set_step(step);
  CallResult result = SendAndCount(job, "/muond.v1.Optimizer/Push", head, deadline, reply);
  if (!result.status.ok()) return result;
  std::int64_t bytes = 0;
  for (const SlicePart& part : job.parts) {
    for (const ElementRange& range : part.ranges) {
      bytes += range.count * static_cast<std::int64_t>(DtypeBytes(part.source->dtype));
    }
  }
  if (reply->bytes() != bytes) {
    result.status = absl::DataLossError(
        absl::StrFormat("run \"%s\": push for step %d: the daemon received %d of %d bytes",
                        job.id.run(), step, reply->bytes(), bytes));
  }
  return result;
}

}  // namespace muond::client
