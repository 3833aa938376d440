#include "server/rpc/incoming_slices.h"

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/long_turns.h"
#include "server/rpc/transport_choice.h"

namespace muond {
namespace {

// Where less is to be copied, it is over before anybody waits for it.
constexpr std::int64_t kLongCopyBytes = 256 << 10;

}  // namespace

TransportPath PathOf(const grpc::CallbackServerContext& context) {
  return IsInProcess(context.peer()) ? TransportPath::kInProcess : TransportPath::kGrpc;
}

IncomingSlices::IncomingSlices(const RpcContext& rpc, const grpc::CallbackServerContext& context)
    : rpc_(rpc), path_(PathOf(context)) {}

absl::Status IncomingSlices::CheckBytes(const v1::Chunk& header, std::int64_t bytes) const {
  if (bytes <= rpc_.max_chunk_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "parameter \"%s\": chunk at element %d: %d bytes, at most %d are accepted "
      "(--max-chunk-bytes)",
      header.parameter(), header.offset(), bytes, rpc_.max_chunk_bytes));
}

absl::StatusOr<Dtype> IncomingSlices::DtypeOf(const v1::Chunk& header) const {
  if (header.dtype() == v1::DTYPE_UNSPECIFIED) {
    const ParameterSpec* spec = run_->FindParameter(header.parameter());
    return spec == nullptr ? Dtype::kF32 : spec->dtype;
  }
  auto named = FromProto(header.dtype());
  if (named.ok()) return named;
  return absl::InvalidArgumentError(absl::StrFormat("parameter \"%s\": chunk: %s",
                                                    header.parameter(),
                                                    named.status().message()));
}

absl::Status IncomingSlices::TakeChunk(const v1::Chunk& header,
                                       std::span<const std::string_view> payload,
                                       const Opener& open, const Closer& close) {
  MUOND_ASSIGN_OR_RETURN(const Dtype dtype, DtypeOf(header));
  const Key key{header.parameter(), header.slice(), header.micro_batch()};
  auto found = open_.find(key);
  if (found == open_.end()) {
    MUOND_ASSIGN_OR_RETURN(
        OpenSlice slice,
        open({rank_, header.parameter(), header.slice(), header.micro_batch()}, dtype));
    found = open_.emplace(key, std::move(slice)).first;
  }
  MUOND_RETURN_IF_ERROR(
      found->second.receiver->Receive({header.offset(), dtype, header.crc32c()}, payload));
  if (!found->second.receiver->complete()) return absl::OkStatus();
  const OpenSlice complete = std::move(found->second);
  open_.erase(found);
  return close(complete);
}

absl::Status IncomingSlices::Take(const ChunkMessage& message, const Opener& open,
                                  const Closer& close) {
  std::optional<LongTurns> turns;
  for (const ReceivedChunk& chunk : message.chunks()) {
    const auto bytes = static_cast<std::int64_t>(chunk.data_bytes);
    rpc_.metrics->OnTransfer(path_, TransportDirection::kReceived, bytes);
    bytes_ += bytes;
    MUOND_RETURN_IF_ERROR(CheckBytes(chunk.header, bytes));
    if (bytes >= kLongCopyBytes && !turns) turns.emplace();
    MUOND_RETURN_IF_ERROR(TakeChunk(chunk.header, message.Payload(chunk), open, close));
  }
  return absl::OkStatus();
}

absl::Status IncomingSlices::Take(const v1::ArenaFill& fill, const Opener& open,
                                  const Closer& close) {
  path_ = TransportPath::kArena;
  if (arena_ == nullptr || arena_->handle() != fill.arena()) {
    MUOND_ASSIGN_OR_RETURN(arena_, rpc_.arenas->Find(fill.arena(), {run_->name(), rank_}));
  }
  MUOND_RETURN_IF_ERROR(arena_->CheckFilled(fill.window(), fill.sequence()));
  const LongTurns turns;
  for (const v1::Chunk& chunk : fill.chunks()) {
    const std::int64_t bytes = chunk.region().bytes();
    MUOND_RETURN_IF_ERROR(CheckBytes(chunk, bytes));
    MUOND_ASSIGN_OR_RETURN(const std::string_view payload,
                           arena_->Region(fill.window(), chunk.region().offset(), bytes));
    rpc_.metrics->OnTransfer(path_, TransportDirection::kReceived, bytes);
    bytes_ += bytes;
    MUOND_RETURN_IF_ERROR(TakeChunk(chunk, {&payload, 1}, open, close));
  }
  arena_->SetDrained(fill.window(), fill.sequence());
  return absl::OkStatus();
}

absl::Status IncomingSlices::CheckNoneOpen() const {
  for (const auto& [key, slice] : open_) {
    MUOND_RETURN_IF_ERROR(slice.receiver->CheckComplete());
  }
  return absl::OkStatus();
}

void IncomingSlices::AbandonAll() {
  for (const auto& [key, slice] : open_) run_->Abandon(slice);
  open_.clear();
}

void IncomingSlices::CountError(const absl::Status& status) const {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
      return rpc_.metrics->OnTransportError(path_, TransportError::kChecksum);
    case absl::StatusCode::kResourceExhausted:
      return rpc_.metrics->OnTransportError(path_, TransportError::kNoMemory);
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
      return rpc_.metrics->OnTransportError(path_, TransportError::kProtocol);
    default:
      return;
  }
}

}  // namespace muond
