// The messages that carry chunks (InitializeRequest, PushRequest, PullReply) as raw buffers:
// ordinary protobuf on the wire, but no payload is ever copied through a protobuf object.
//
// Sending takes a payload that its owner has copied into a slice once; borrowing the trainer's
// memory instead would let a cancelled call leave the transport with pointers into it. Receiving
// finds the payload in the slices that the transport delivered, from where it is copied straight to
// its destination. Plain values and pure functions: no thread rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "muond/v1/optimizer.pb.h"

namespace muond {

// A chunk on its way out.
struct SentChunk {
  int field = 0;     // of the message that it stands in: PushRequest::kChunkFieldNumber
  v1::Chunk header;  // everything but data and crc32c
  grpc::Slice payload;
};

// The message `head` with these chunks behind its own fields, each with the crc32c of its payload.
// `head` must not have a chunk.
grpc::ByteBuffer EncodeChunks(const google::protobuf::MessageLite& head,
                              std::span<SentChunk> chunks);

// `bytes` bytes of `data` as a slice of their own.
grpc::Slice CopyToSlice(const void* data, std::size_t bytes);

// A chunk whose payload is still where it was received.
struct ReceivedChunk {
  v1::Chunk header;             // everything but data
  std::size_t data_offset = 0;  // of the payload in the message
  std::size_t data_bytes = 0;
};

// A received message, taken apart. Holds the transport's memory.
class ChunkMessage {
 public:
  // Finds the chunks, in their order: the fields of these numbers. All other fields go to `head`.
  // DATA_LOSS when the bytes are no such message.
  static absl::StatusOr<ChunkMessage> Decode(const grpc::ByteBuffer& message,
                                             std::span<const int> chunk_fields,
                                             google::protobuf::MessageLite* head);

  const std::vector<ReceivedChunk>& chunks() const { return chunks_; }
  // The payload in the pieces that it came in. Valid as long as this object.
  std::vector<std::string_view> Payload(const ReceivedChunk& chunk) const;

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<ReceivedChunk> chunks_;
};

// Of all pieces, one behind the other.
std::uint32_t Crc32cOf(std::span<const std::string_view> pieces);

}  // namespace muond
