// How slices come back: one attempt of a Pull stream, every chunk checked and copied straight to
// where it belongs, and proof at the end that no element was left out.
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

// What comes from one daemon for a sink that has passed SliceTable::Check.
struct SinkPart {
  const SliceSink* sink = nullptr;
  const Box* box = nullptr;          // of its slice
  std::vector<ElementRange> ranges;  // ascending; not empty, none empty
};

// What is asked of one daemon.
struct PullJob {
  std::shared_ptr<grpc::Channel> channel;
  v1::RunId id;
  std::int64_t rank = 0;
  std::int64_t version = 0;
  std::span<const SinkPart> parts;
  bool master = false;
  std::int64_t chunk_bytes = 0;
  std::shared_ptr<ArenaLink> arena;  // null: payloads come in the messages
};

// One attempt. DATA_LOSS for a wrong CRC, a hole, an overlap, a wrong element type or slices that
// end early; INTERNAL for chunks of another version or of what was not asked for. The sinks'
// contents are undefined on error.
CallResult ReceivePull(const PullJob& job, absl::Time deadline);

}  // namespace muond::client
