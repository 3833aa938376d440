#include "server/rpc/incoming_slices.h"

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond {

absl::StatusOr<std::optional<OpenSlice>> IncomingSlices::Take(const v1::Chunk& chunk,
                                                              const Opener& open) {
  if (static_cast<std::int64_t>(chunk.data().size()) > max_chunk_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("parameter \"%s\": chunk at element %d: %d bytes, at most %d are accepted "
                        "(--max-chunk-bytes)",
                        chunk.parameter(), chunk.offset(), chunk.data().size(), max_chunk_bytes_));
  }
  const Key key{chunk.parameter(), chunk.slice(), chunk.micro_batch()};
  auto found = open_.find(key);
  Dtype dtype = Dtype::kF32;
  if (chunk.dtype() != v1::DTYPE_UNSPECIFIED) {
    auto named = FromProto(chunk.dtype());
    if (!named.ok()) {
      return absl::InvalidArgumentError(absl::StrFormat("parameter \"%s\": chunk: %s",
                                                        chunk.parameter(),
                                                        named.status().message()));
    }
    dtype = *named;
  } else if (const ParameterSpec* spec = run_->FindParameter(chunk.parameter())) {
    dtype = spec->dtype;
  }
  if (found == open_.end()) {
    MUOND_ASSIGN_OR_RETURN(
        OpenSlice slice,
        open({rank_, chunk.parameter(), chunk.slice(), chunk.micro_batch()}, dtype));
    found = open_.emplace(key, std::move(slice)).first;
  }
  MUOND_RETURN_IF_ERROR(found->second.receiver->Receive(
      {chunk.offset(), dtype, chunk.crc32c()},
      absl::string_view(chunk.data().data(), chunk.data().size())));
  if (!found->second.receiver->complete()) return std::optional<OpenSlice>();
  std::optional<OpenSlice> complete = std::move(found->second);
  open_.erase(found);
  return complete;
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

void CountError(DaemonMetrics* metrics, const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
      return metrics->OnTransportError(TransportPath::kGrpc, TransportError::kChecksum);
    case absl::StatusCode::kResourceExhausted:
      return metrics->OnTransportError(TransportPath::kGrpc, TransportError::kNoMemory);
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
      return metrics->OnTransportError(TransportPath::kGrpc, TransportError::kProtocol);
    default:
      return;
  }
}

}  // namespace muond
