// The chunk messages of Initialize, Push and Pull as raw buffers: ordinary protobuf on the wire,
// but the payload is never copied through a protobuf object.
//
// Sending copies a payload once, from the trainer's memory into the message; borrowing that memory
// instead would let a cancelled call leave the transport with pointers into it. Receiving copies
// once as well, from the received slices straight to the destination.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "muond/v1/optimizer.pb.h"

namespace muond::client {

// The message `head` with its chunk: field number `chunk_field`, the fields of `header`, its crc32c
// set here, and `bytes` bytes of `data`. `head` must not have a chunk, `header` no data.
grpc::ByteBuffer EncodeChunkMessage(const google::protobuf::MessageLite& head, int chunk_field,
                                    v1::Chunk header, const void* data, std::size_t bytes);

// A PullReply whose payload is still where it was received.
struct PulledChunk {
  std::int64_t version = 0;
  v1::Chunk header;              // everything but data
  std::size_t data_offset = 0;   // of the payload in the message
  std::size_t data_bytes = 0;
};

// Finds the parts of a PullReply. DATA_LOSS when the bytes are no such message.
absl::StatusOr<PulledChunk> DecodePullReply(grpc::ByteBuffer& message);

// Copies the payload that DecodePullReply found to `destination`, which has room for data_bytes.
// DATA_LOSS when it does not have the announced CRC; the destination then holds the bad bytes.
absl::Status CopyPayload(grpc::ByteBuffer& message, const PulledChunk& chunk, void* destination);

}  // namespace muond::client
