#include "proto/chunk_message.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "proto/crc32c.h"

namespace muond {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

// Payloads below this are copied beside their headers: a slice of its own costs more.
constexpr std::size_t kSmallPayloadBytes = 4096;

// The slices of a message as one stream.
class SliceStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  explicit SliceStream(const std::vector<grpc::Slice>& slices) : slices_(slices) {}

  bool Next(const void** data, int* size) override {
    while (next_ < slices_.size() && left_ == 0) left_ = slices_[next_++].size();
    if (left_ == 0) return false;
    *data = slices_[next_ - 1].end() - left_;
    *size = static_cast<int>(left_);
    count_ += static_cast<std::int64_t>(left_);
    left_ = 0;
    return true;
  }
  void BackUp(int count) override {
    left_ = static_cast<std::size_t>(count);
    count_ -= count;
  }
  bool Skip(int count) override {
    const void* data;
    int size;
    while (count > 0 && Next(&data, &size)) {
      if (size > count) BackUp(size - count);
      count -= std::min(size, count);
    }
    return count == 0;
  }
  int64_t ByteCount() const override { return count_; }

 private:
  const std::vector<grpc::Slice>& slices_;
  std::size_t next_ = 0;  // slice
  std::size_t left_ = 0;  // bytes of the slice before it that are not read yet
  std::int64_t count_ = 0;
};

// Reads one field of a chunk; the payload is only located.
bool ReadChunkField(CodedInputStream& in, std::uint32_t tag, ReceivedChunk& chunk) {
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

bool ReadChunk(CodedInputStream& in, ReceivedChunk& chunk) {
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

// Everything of a chunk field that stands before its payload.
void WriteChunkFront(const SentChunk& chunk, std::uint32_t crc, std::string& front) {
  v1::Chunk header = chunk.header;
  header.set_crc32c(crc);
  const auto length = static_cast<std::uint32_t>(chunk.payload.size());
  const std::uint32_t data_tag = WireFormatLite::MakeTag(
      v1::Chunk::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  const std::size_t chunk_bytes = header.ByteSizeLong() +
                                  CodedOutputStream::VarintSize32(data_tag) +
                                  CodedOutputStream::VarintSize32(length) + length;
  google::protobuf::io::StringOutputStream stream(&front);
  CodedOutputStream out(&stream);
  out.WriteTag(WireFormatLite::MakeTag(chunk.field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  out.WriteVarint32(static_cast<std::uint32_t>(chunk_bytes));
  header.SerializeToCodedStream(&out);
  out.WriteTag(data_tag);
  out.WriteVarint32(length);
}

}  // namespace

grpc::Slice CopyToSlice(const void* data, std::size_t bytes) { return grpc::Slice(data, bytes); }

grpc::ByteBuffer EncodeChunks(const google::protobuf::MessageLite& head,
                              std::span<SentChunk> chunks) {
  std::vector<grpc::Slice> slices;
  std::string front = head.SerializeAsString();
  for (const SentChunk& chunk : chunks) {
    WriteChunkFront(chunk, Crc32c(chunk.payload.begin(), chunk.payload.size()), front);
    if (chunk.payload.size() < kSmallPayloadBytes) {
      front.append(reinterpret_cast<const char*>(chunk.payload.begin()), chunk.payload.size());
      continue;
    }
    slices.emplace_back(front);
    slices.push_back(chunk.payload);
    front.clear();
  }
  if (!front.empty() || slices.empty()) slices.emplace_back(front);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<ChunkMessage> ChunkMessage::Decode(const grpc::ByteBuffer& message,
                                                  std::span<const int> chunk_fields,
                                                  google::protobuf::MessageLite* head) {
  ChunkMessage result;
  bool good = message.Dump(&result.slices_).ok();
  std::string rest;  // all fields but the chunks
  {
    SliceStream stream(result.slices_);
    CodedInputStream in(&stream);
    google::protobuf::io::StringOutputStream rest_stream(&rest);
    CodedOutputStream out(&rest_stream);
    while (good) {
      const std::uint32_t tag = in.ReadTag();
      if (tag == 0) break;
      const bool chunk = std::find(chunk_fields.begin(), chunk_fields.end(),
                                   WireFormatLite::GetTagFieldNumber(tag)) != chunk_fields.end() &&
                         WireFormatLite::GetTagWireType(tag) ==
                             WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
      good = chunk ? ReadChunk(in, result.chunks_.emplace_back())
                   : WireFormatLite::SkipField(&in, tag, &out);
    }
    good = good && in.ConsumedEntireMessage();
  }
  if (!good || !head->ParseFromString(rest)) {
    return absl::DataLossError(absl::StrFormat(
        "a message of %d bytes is no %s", message.Length(), head->GetTypeName()));
  }
  return result;
}

std::vector<std::string_view> ChunkMessage::Payload(const ReceivedChunk& chunk) const {
  std::vector<std::string_view> pieces;
  std::size_t skip = chunk.data_offset, want = chunk.data_bytes;
  for (const grpc::Slice& slice : slices_) {
    if (want == 0) break;
    if (skip >= slice.size()) {
      skip -= slice.size();
      continue;
    }
    const std::size_t bytes = std::min(slice.size() - skip, want);
    pieces.emplace_back(reinterpret_cast<const char*>(slice.begin()) + skip, bytes);
    want -= bytes;
    skip = 0;
  }
  return pieces;
}

std::uint32_t Crc32cOf(std::span<const std::string_view> pieces) {
  std::uint32_t crc = 0;
  for (const std::string_view piece : pieces) crc = Crc32c(piece.data(), piece.size(), crc);
  return crc;
}

}  // namespace muond
