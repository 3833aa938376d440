#include "client/cpp/pull_assembly.h"

#include <cstddef>
#include <cstring>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/crc32c.h"

namespace muond::client {

PullAssembly::PullAssembly(const PullJob& job, v1::PullRequest& request) : job_(job) {
  *request.mutable_id() = job.id;
  request.set_rank(job.rank);
  request.set_version(job.version);
  request.set_chunk_bytes(job.chunk_bytes);
  request.set_master(job.master);
  request.set_batch(true);
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

absl::Status PullAssembly::Take(std::int64_t version, const v1::Chunk& header,
                                std::span<const std::string_view> payload) {
  if (version != job_.version) {
    return absl::InternalError(absl::StrFormat(
        "parameter \"%s\": pull of version %d: got a chunk of version %d", header.parameter(),
        job_.version, version));
  }
  const auto found = progress_.find(std::pair(header.parameter(), header.slice()));
  if (found == progress_.end()) {
    return absl::InternalError(absl::StrFormat(
        "parameter \"%s\": pull of version %d: slice %d was not asked for", header.parameter(),
        job_.version, header.slice()));
  }
  std::int64_t bytes = 0;
  for (const std::string_view piece : payload) bytes += std::ssize(piece);
  Progress& progress = found->second;
  MUOND_ASSIGN_OR_RETURN(const std::int64_t count, CountOf(header, bytes, progress));
  const SliceSink& sink = *progress.part->sink;
  std::byte* const begin = static_cast<std::byte*>(sink.data) +
                           progress.next * static_cast<std::int64_t>(DtypeBytes(sink.dtype));
  std::byte* to = begin;
  for (const std::string_view piece : payload) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  // Of what arrived in the sink, not of where it came from: that may be memory of others.
  const std::uint32_t crc = Crc32c(begin, static_cast<std::size_t>(bytes));
  if (crc != header.crc32c()) {
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: crc32c of the %d bytes at element %d is %08x, "
        "announced %08x",
        header.parameter(), header.slice(), bytes, header.offset(), crc, header.crc32c()));
  }
  progress.Advance(count);
  return absl::OkStatus();
}

absl::Status PullAssembly::CheckComplete() const {
  for (const auto& [key, progress] : progress_) {
    if (progress.complete()) continue;
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of version %d: slice %d ended before element %d of %d", key.first,
        job_.version, progress.part->sink->slice, progress.next, progress.part->sink->elements));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::int64_t> PullAssembly::CountOf(const v1::Chunk& header, std::int64_t bytes,
                                                   const Progress& progress) const {
  const SliceSink& sink = *progress.part->sink;
  const auto element_bytes = static_cast<std::int64_t>(DtypeBytes(sink.dtype));
  if (header.dtype() != v1::DTYPE_UNSPECIFIED && header.dtype() != ToProto(sink.dtype)) {
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: expected elements of type %s, got %s",
        sink.parameter, sink.slice, v1::Dtype_Name(ToProto(sink.dtype)),
        v1::Dtype_Name(header.dtype())));
  }
  const std::int64_t count = bytes / element_bytes;
  if (header.offset() != progress.next || bytes % element_bytes != 0 || count == 0 ||
      count > progress.room()) {
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: expected at most %d elements from %d on, got %d "
        "bytes at element %d",
        sink.parameter, sink.slice, progress.room(), progress.next, bytes, header.offset()));
  }
  return count;
}

}  // namespace muond::client
