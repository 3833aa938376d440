#include "client/cpp/wire.h"

#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"
#include "proto/crc32c.h"

namespace muond::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

// Reads one field of a chunk; the payload is only located.
bool ReadChunkField(CodedInputStream& in, std::uint32_t tag, PulledChunk& chunk) {
  const auto read_int64 = [&in](std::int64_t& value) {
    std::uint64_t bits = 0;
    if (!in.ReadVarint64(&bits)) return false;
    value = static_cast<std::int64_t>(bits);
    return true;
  };
  std::int64_t value = 0;
  std::uint32_t length = 0;
  switch (tag) {
    case WireFormatLite::MakeTag(v1::Chunk::kParameterFieldNumber,
                                 WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
      return in.ReadVarint32(&length) &&
             in.ReadString(chunk.header.mutable_parameter(), static_cast<int>(length));
    case WireFormatLite::MakeTag(v1::Chunk::kSliceFieldNumber, WireFormatLite::WIRETYPE_VARINT):
      if (!read_int64(value)) return false;
      chunk.header.set_slice(value);
      return true;
    case WireFormatLite::MakeTag(v1::Chunk::kMicroBatchFieldNumber,
                                 WireFormatLite::WIRETYPE_VARINT):
      if (!read_int64(value)) return false;
      chunk.header.set_micro_batch(value);
      return true;
    case WireFormatLite::MakeTag(v1::Chunk::kDtypeFieldNumber, WireFormatLite::WIRETYPE_VARINT):
      if (!read_int64(value)) return false;
      chunk.header.set_dtype(static_cast<v1::Dtype>(value));
      return true;
    case WireFormatLite::MakeTag(v1::Chunk::kOffsetFieldNumber, WireFormatLite::WIRETYPE_VARINT):
      if (!read_int64(value)) return false;
      chunk.header.set_offset(value);
      return true;
    case WireFormatLite::MakeTag(v1::Chunk::kCrc32CFieldNumber, WireFormatLite::WIRETYPE_FIXED32): {
      std::uint32_t crc = 0;
      if (!in.ReadLittleEndian32(&crc)) return false;
      chunk.header.set_crc32c(crc);
      return true;
    }
    case WireFormatLite::MakeTag(v1::Chunk::kDataFieldNumber,
                                 WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
      if (!in.ReadVarint32(&length)) return false;
      chunk.data_offset = static_cast<std::size_t>(in.CurrentPosition());
      chunk.data_bytes = length;
      return in.Skip(static_cast<int>(length));
    default:
      return WireFormatLite::SkipField(&in, tag);
  }
}

bool ReadChunk(CodedInputStream& in, PulledChunk& chunk) {
  std::uint32_t length = 0;
  if (!in.ReadVarint32(&length)) return false;
  const auto limit = in.PushLimit(static_cast<int>(length));
  while (const std::uint32_t tag = in.ReadTag()) {
    if (!ReadChunkField(in, tag, chunk)) return false;
  }
  const bool whole = in.ConsumedEntireMessage() && in.BytesUntilLimit() == 0;
  in.PopLimit(limit);
  return whole;
}

}  // namespace

grpc::ByteBuffer EncodeChunkMessage(const google::protobuf::MessageLite& head, int chunk_field,
                                    v1::Chunk header, const void* data, std::size_t bytes) {
  const grpc::Slice payload(data, bytes);
  // Of the copy, not of the original: it is in the cache now, and it is what is sent.
  header.set_crc32c(Crc32c(payload.begin(), bytes));
  const auto length = static_cast<std::uint32_t>(bytes);
  const std::uint32_t data_tag = WireFormatLite::MakeTag(
      v1::Chunk::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  const std::size_t chunk_bytes = header.ByteSizeLong() +
                                  CodedOutputStream::VarintSize32(data_tag) +
                                  CodedOutputStream::VarintSize32(length) + bytes;
  std::string front;
  {
    google::protobuf::io::StringOutputStream stream(&front);
    CodedOutputStream out(&stream);
    head.SerializeToCodedStream(&out);
    out.WriteTag(WireFormatLite::MakeTag(chunk_field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    out.WriteVarint32(static_cast<std::uint32_t>(chunk_bytes));
    header.SerializeToCodedStream(&out);
    out.WriteTag(data_tag);
    out.WriteVarint32(length);
  }
  const grpc::Slice slices[] = {grpc::Slice(front), payload};
  return grpc::ByteBuffer(slices, 2);
}

absl::StatusOr<PulledChunk> DecodePullReply(grpc::ByteBuffer& message) {
  PulledChunk chunk;
  grpc::ProtoBufferReader reader(&message);
  CodedInputStream in(&reader);
  bool good = reader.status().ok();
  while (good) {
    const std::uint32_t tag = in.ReadTag();
    if (tag == 0) break;
    if (tag == WireFormatLite::MakeTag(v1::PullReply::kVersionFieldNumber,
                                       WireFormatLite::WIRETYPE_VARINT)) {
      std::uint64_t version = 0;
      good = in.ReadVarint64(&version);
      chunk.version = static_cast<std::int64_t>(version);
    } else if (tag == WireFormatLite::MakeTag(v1::PullReply::kChunkFieldNumber,
                                              WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
      good = ReadChunk(in, chunk);
    } else {
      good = WireFormatLite::SkipField(&in, tag);
    }
  }
  if (!good || !in.ConsumedEntireMessage()) {
    return absl::DataLossError(
        absl::StrFormat("pull: a message of %d bytes is not a chunk", message.Length()));
  }
  return chunk;
}

absl::Status CopyPayload(grpc::ByteBuffer& message, const PulledChunk& chunk, void* destination) {
  grpc::ProtoBufferReader reader(&message);
  CodedInputStream in(&reader);
  const int bytes = static_cast<int>(chunk.data_bytes);
  if (!in.Skip(static_cast<int>(chunk.data_offset)) || !in.ReadRaw(destination, bytes)) {
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: the message ends before its %d bytes of data",
        chunk.header.parameter(), chunk.header.slice(), bytes));
  }
  const std::uint32_t crc = Crc32c(destination, chunk.data_bytes);
  if (crc != chunk.header.crc32c()) {
    return absl::DataLossError(absl::StrFormat(
        "parameter \"%s\": pull of slice %d: crc32c of the %d bytes at element %d is %08x, "
        "announced %08x",
        chunk.header.parameter(), chunk.header.slice(), bytes, chunk.header.offset(), crc,
        chunk.header.crc32c()));
  }
  return absl::OkStatus();
}

}  // namespace muond::client
