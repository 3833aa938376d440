// How slices go to the daemon: one attempt of an Initialize or a Push stream, cut into chunks, each
// with its CRC, written as raw buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "grpcpp/channel.h"
#include "muond/v1/optimizer.pb.h"
#include "proto/shard.h"

namespace muond::client {

class ArenaLink;

// What one daemon gets of a slice that has passed SliceTable::Check. The buffer is only read.
struct SlicePart {
  const SliceSource* source = nullptr;
  std::vector<ElementRange> ranges;  // ascending; not empty, none empty
};

// What one daemon gets.
struct PushJob {
  std::shared_ptr<grpc::Channel> channel;
  v1::RunId id;
  std::int64_t rank = 0;
  std::span<const SlicePart> parts;
  std::int64_t chunk_bytes = 0;  // largest payload of a chunk
  std::shared_ptr<ArenaLink> arena;  // null: payloads go in the messages
};

// One attempt. Without a part the stream still opens and names run and rank: the reply tells
// what is missing. DATA_LOSS when the daemon's count of slices or bytes is not what was sent.
CallResult SendInitialize(const PushJob& job, absl::Time deadline, v1::InitializeReply* reply);
CallResult SendPush(const PushJob& job, std::int64_t step, absl::Time deadline,
                    v1::PushReply* reply);

}  // namespace muond::client
