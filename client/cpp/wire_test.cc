#include "client/cpp/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/crc32c.h"

namespace muond::client {
namespace {

std::string Flatten(grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// In pieces of `piece` bytes, as the transport delivers messages.
grpc::ByteBuffer Scatter(const std::string& bytes, std::size_t piece) {
  std::vector<grpc::Slice> slices;
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    slices.emplace_back(bytes.data() + at, std::min(piece, bytes.size() - at));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

v1::PullReply SomeReply() {
  v1::PullReply reply;
  reply.set_version(7);
  v1::Chunk& chunk = *reply.mutable_chunk();
  chunk.set_parameter("blk.0.wq");
  chunk.set_slice(3);
  chunk.set_dtype(v1::DTYPE_BF16);
  chunk.set_offset(1'000'000'000'000);
  chunk.set_data("0123456789abcdef0123456789abcdef");
  chunk.set_crc32c(Crc32c(chunk.data().data(), chunk.data().size()));
  return reply;
}

TEST(Wire, WhatIsEncodedIsTheOrdinaryMessage) {
  v1::PushRequest head;
  head.mutable_id()->set_run("r");
  head.set_rank(2);
  head.set_step(9);
  v1::Chunk header;
  header.set_parameter("w");
  header.set_offset(12);
  const std::string data(100'000, 'x');
  grpc::ByteBuffer buffer = EncodeChunkMessage(head, v1::PushRequest::kChunkFieldNumber, header,
                                               data.data(), data.size());
  v1::PushRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(Flatten(buffer)));
  v1::PushRequest expected = head;
  *expected.mutable_chunk() = header;
  expected.mutable_chunk()->set_data(data);
  expected.mutable_chunk()->set_crc32c(Crc32c(data.data(), data.size()));
  EXPECT_EQ(parsed.SerializeAsString(), expected.SerializeAsString());
}

TEST(Wire, DecodesWhateverTheTransportsPieces) {
  const v1::PullReply reply = SomeReply();
  for (const std::size_t piece : {1, 2, 7, 31, 1000}) {
    grpc::ByteBuffer buffer = Scatter(reply.SerializeAsString(), piece);
    const auto chunk = DecodePullReply(buffer);
    ASSERT_TRUE(chunk.ok()) << chunk.status();
    EXPECT_EQ(chunk->version, 7);
    v1::Chunk header = reply.chunk();
    header.clear_data();
    EXPECT_EQ(chunk->header.SerializeAsString(), header.SerializeAsString());
    std::string data(chunk->data_bytes, '\0');
    ASSERT_TRUE(CopyPayload(buffer, *chunk, data.data()).ok());
    EXPECT_EQ(data, reply.chunk().data());
  }
}

TEST(Wire, TakesFieldsInAnyOrderAndSkipsThoseItDoesNotKnow) {
  const v1::PullReply reply = SomeReply();
  v1::PullReply data_only;
  data_only.mutable_chunk()->set_data(reply.chunk().data());
  v1::PullReply rest = reply;
  rest.mutable_chunk()->clear_data();
  // One chunk submessage whose data come first, then the other fields, then unknown ones.
  std::string chunk = data_only.chunk().SerializeAsString() + rest.chunk().SerializeAsString();
  chunk += "\xa2\x06\x03xyz";  // field 100, three bytes
  ASSERT_LT(chunk.size(), 128u);
  std::string bytes = "\x12" + std::string(1, static_cast<char>(chunk.size())) + chunk +
                      "\xa0\x06\x05" + "\x08\x07";  // field 100 = 5, version = 7
  grpc::ByteBuffer buffer = Scatter(bytes, 5);
  const auto decoded = DecodePullReply(buffer);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->version, 7);
  EXPECT_EQ(decoded->header.offset(), reply.chunk().offset());
  std::string data(decoded->data_bytes, '\0');
  EXPECT_TRUE(CopyPayload(buffer, *decoded, data.data()).ok());
  EXPECT_EQ(data, reply.chunk().data());
}

TEST(Wire, EveryTruncationIsDataLoss) {
  const std::string bytes = SomeReply().SerializeAsString();
  for (std::size_t length = 3; length < bytes.size(); ++length) {
    grpc::ByteBuffer buffer = Scatter(bytes.substr(0, length), 8);
    EXPECT_TRUE(absl::IsDataLoss(DecodePullReply(buffer).status())) << length;
  }
}

TEST(Wire, NoByteOfADamagedMessageIsTrustedBeyondItsEnd) {
  const std::string bytes = SomeReply().SerializeAsString();
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (const int mask : {0x01, 0x80, 0xff}) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ mask);
      grpc::ByteBuffer buffer = Scatter(damaged, 8);
      const auto chunk = DecodePullReply(buffer);
      if (!chunk.ok()) continue;
      ASSERT_LE(chunk->data_offset + chunk->data_bytes, damaged.size());
    }
  }
}

TEST(Wire, AFlippedBitOfThePayloadIsDataLossThatNamesTheSlice) {
  v1::PullReply reply = SomeReply();
  (*reply.mutable_chunk()->mutable_data())[5] ^= 1;
  grpc::ByteBuffer buffer = Scatter(reply.SerializeAsString(), 8);
  const auto chunk = DecodePullReply(buffer);
  ASSERT_TRUE(chunk.ok());
  std::string data(chunk->data_bytes, '\0');
  const absl::Status status = CopyPayload(buffer, *chunk, data.data());
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("parameter \"blk.0.wq\": pull of slice 3: crc32c"));
}

}  // namespace
}  // namespace muond::client
