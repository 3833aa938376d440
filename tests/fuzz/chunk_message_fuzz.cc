// Messages with chunks as raw buffers, in slices of any size, against protobuf's own reading.
#include <string>
#include <vector>

#include "google/protobuf/stubs/logging.h"
#include "grpcpp/support/byte_buffer.h"
#include "muond/v1/optimizer.pb.h"
#include "proto/check.h"
#include "proto/chunk_message.h"
#include "tests/fuzz/input.h"

namespace muond::fuzz {
namespace {

grpc::ByteBuffer Sliced(std::string_view bytes, std::size_t piece) {
  std::vector<grpc::Slice> slices;
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    slices.emplace_back(std::string(bytes.substr(at, piece)));
  }
  return {slices.data(), slices.size()};
}

std::string PayloadOf(const ChunkMessage& message, const ReceivedChunk& chunk) {
  std::string payload;
  for (const std::string_view piece : message.Payload(chunk)) payload += piece;
  return payload;
}

void CheckPush(const ChunkMessage& message, const v1::PushRequest& head, std::string_view bytes) {
  for (const ReceivedChunk& chunk : message.chunks()) {
    MUOND_CHECK(chunk.data_offset + chunk.data_bytes <= bytes.size(), "payload within the message");
    const std::string payload = PayloadOf(message, chunk);
    MUOND_CHECK(payload.size() == chunk.data_bytes, "the whole payload");
    const std::vector<std::string_view> in_one = {payload};
    MUOND_CHECK(Crc32cOf(message.Payload(chunk)) == Crc32cOf(in_one), "cut or whole");
  }
  // Where protobuf reads it too, and no field came twice, both say the same.
  v1::PushRequest whole;
  if (message.chunks().size() != 1 || !whole.ParseFromArray(bytes.data(), bytes.size())) return;
  MUOND_CHECK(head.step() == whole.step() && head.rank() == whole.rank(), "the head's fields");
  MUOND_CHECK(whole.has_chunk(), "a chunk is a chunk");
  const ReceivedChunk& chunk = message.chunks()[0];
  MUOND_CHECK(chunk.header.parameter() == whole.chunk().parameter(), "its name");
  MUOND_CHECK(chunk.header.offset() == whole.chunk().offset(), "its place");
  MUOND_CHECK(PayloadOf(message, chunk) == whole.chunk().data(), "its payload");
}

}  // namespace
}  // namespace muond::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace muond;  // NOLINT
  // It would say of each text that is no UTF-8 that it is none.
  [[maybe_unused]] static const auto former = google::protobuf::SetLogHandler(nullptr);
  fuzz::Input input(data, size);
  const int kind = input.Below(3);
  const std::size_t piece = 1 + input.Byte();
  const std::string_view bytes = input.Rest();
  const grpc::ByteBuffer buffer = fuzz::Sliced(bytes, piece);
  if (kind == 0) {
    const int fields[] = {v1::PushRequest::kChunkFieldNumber};
    v1::PushRequest head;
    const auto message = ChunkMessage::Decode(buffer, fields, &head);
    if (message.ok()) fuzz::CheckPush(*message, head, bytes);
  } else if (kind == 1) {
    const int fields[] = {v1::PullReply::kChunkFieldNumber, v1::PullReply::kMoreFieldNumber};
    v1::PullReply head;
    const auto message = ChunkMessage::Decode(buffer, fields, &head);
    for (const auto& chunk : message.ok() ? message->chunks() : std::vector<ReceivedChunk>{}) {
      MUOND_CHECK(chunk.data_offset + chunk.data_bytes <= bytes.size(), "within the message");
    }
  } else {
    v1::PullRequest head;
    const auto message = ChunkMessage::Decode(buffer, {}, &head);
    v1::PullRequest whole;
    // Tags and lengths that are longer than they need be are read here, and not by protobuf.
    const bool legal = whole.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
    MUOND_CHECK(!legal || (message.ok() &&
                           head.SerializeAsString() == whole.SerializeAsString()),
                "without chunks it is protobuf's own reading");
  }
  return 0;
}
