#include "client/cpp/pull_stream.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cpp/wire.h"
#include "grpcpp/client_context.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/sync_stream.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace muond::client {
namespace {

using Reader = grpc::ClientReader<grpc::ByteBuffer>;

// The sinks as the request names them, each with the element that must come next.
class Assembly {
 public:
  Assembly(const PullJob& job, v1::PullRequest& request) : job_(job) {
    std::map<std::string, v1::ParameterSlices*> by_name;
    for (const SinkPart& part : job.parts) {
      const std::string& name = part.sink->parameter;
      v1::ParameterSlices*& slices = by_name[name];
      if (slices == nullptr) {
        slices = request.add_slices();
        slices->set_parameter(name);
      }
      const std::int64_t index = slices->boxes_size();
      *slices->add_boxes() = ToProto(*part.box);
      progress_.emplace(std::pair(name, index), Progress(part));
    }
  }

  bool empty() const { return progress_.empty(); }

  absl::Status Take(grpc::ByteBuffer& message) {
    MUOND_ASSIGN_OR_RETURN(const PulledChunk chunk, DecodePullReply(message));
    const v1::Chunk& header = chunk.header;
    if (chunk.version != job_.version) {
      return absl::InternalError(absl::StrFormat(
          "parameter \"%s\": pull of version %d: got a chunk of version %d", header.parameter(),
          job_.version, chunk.version));
    }
    const auto found = progress_.find(std::pair(header.parameter(), header.slice()));
    if (found == progress_.end()) {
      return absl::InternalError(absl::StrFormat(
          "parameter \"%s\": pull of version %d: slice %d was not asked for", header.parameter(),
          job_.version, header.slice()));
    }
    Progress& progress = found->second;
    MUOND_ASSIGN_OR_RETURN(const std::int64_t count, CountOf(chunk, progress));
    const SliceSink& sink = *progress.part->sink;
    const auto offset = static_cast<std::size_t>(progress.next) * DtypeBytes(sink.dtype);
    MUOND_RETURN_IF_ERROR(
        CopyPayload(message, chunk, static_cast<std::byte*>(sink.data) + offset));
    progress.Advance(count);
    return absl::OkStatus();
  }

  absl::Status CheckComplete() const {
    for (const auto& [key, progress] : progress_) {
      if (progress.complete()) continue;
      return absl::DataLossError(absl::StrFormat(
          "parameter \"%s\": pull of version %d: slice %d ended before element %d of %d", key.first,
          job_.version, progress.part->sink->slice, progress.next,
          progress.part->sink->elements));
    }
    return absl::OkStatus();
  }

 private:
  struct Progress {
    explicit Progress(const SinkPart& p) : part(&p), next(p.ranges[0].first) {}
    bool complete() const { return range == part->ranges.size(); }
    // Elements that may still come before the next hole.
    std::int64_t room() const {
      return complete() ? 0 : part->ranges[range].first + part->ranges[range].count - next;
    }
    void Advance(std::int64_t count) {
      next += count;
      if (room() == 0 && ++range < part->ranges.size()) next = part->ranges[range].first;
    }

    const SinkPart* part;
    std::size_t range = 0;  // the one that is coming in
    std::int64_t next;      // element of the slice that must come next
  };

  // The elements of a chunk that fits where its sink stands.
  absl::StatusOr<std::int64_t> CountOf(const PulledChunk& chunk, const Progress& progress) const {
    const SliceSink& sink = *progress.part->sink;
    const v1::Chunk& header = chunk.header;
    const auto element_bytes = DtypeBytes(sink.dtype);
    if (header.dtype() != v1::DTYPE_UNSPECIFIED && header.dtype() != ToProto(sink.dtype)) {
      return absl::DataLossError(absl::StrFormat(
          "parameter \"%s\": pull of slice %d: expected elements of type %s, got %s",
          sink.parameter, sink.slice, v1::Dtype_Name(ToProto(sink.dtype)),
          v1::Dtype_Name(header.dtype())));
    }
    const auto count = static_cast<std::int64_t>(chunk.data_bytes / element_bytes);
    if (header.offset() != progress.next || chunk.data_bytes % element_bytes != 0 || count == 0 ||
        count > progress.room()) {
      return absl::DataLossError(absl::StrFormat(
          "parameter \"%s\": pull of slice %d: expected at most %d elements from %d on, got %d "
          "bytes at element %d",
          sink.parameter, sink.slice, progress.room(), progress.next, chunk.data_bytes,
          header.offset()));
    }
    return count;
  }

  const PullJob& job_;
  std::map<std::pair<std::string, std::int64_t>, Progress> progress_;
};

}  // namespace

CallResult ReceivePull(const PullJob& job, absl::Time deadline) {
  v1::PullRequest request;
  *request.mutable_id() = job.id;
  request.set_rank(job.rank);
  request.set_version(job.version);
  request.set_chunk_bytes(job.chunk_bytes);
  request.set_master(job.master);
  Assembly assembly(job, request);
  if (assembly.empty()) return {};  // an empty list in the request would mean all slices

  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  const CallScope::Call scoped(context);
  const grpc::internal::RpcMethod rpc("/muond.v1.Optimizer/Pull",
                                      grpc::internal::RpcMethod::SERVER_STREAMING);
  const std::unique_ptr<Reader> reader(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(job.channel.get(), rpc,
                                                                    &context, request));
  absl::Status taken;
  for (grpc::ByteBuffer message; taken.ok() && reader->Read(&message);) {
    taken = assembly.Take(message);
  }
  if (!taken.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!taken.ok()) return {taken, std::nullopt};
  if (!status.ok()) return {FromGrpc(status), PositionFrom(context)};
  return {assembly.CheckComplete(), std::nullopt};
}

}  // namespace muond::client
