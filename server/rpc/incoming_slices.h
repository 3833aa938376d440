// The slices that one stream is sending, by the name that its chunks give them, whichever way their
// bytes come: in the messages themselves or through an arena.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "proto/chunk_message.h"
#include "server/metrics/daemon_metrics.h"
#include "server/rpc/optimizer_service.h"
#include "server/run/run.h"

namespace muond {

class IncomingSlices {
 public:
  using Opener = std::function<absl::StatusOr<OpenSlice>(const SliceAddress&, Dtype)>;
  // Gets each slice when it is complete.
  using Closer = std::function<absl::Status(const OpenSlice&)>;

  IncomingSlices(const RpcContext& rpc, const grpc::CallbackServerContext& context);

  void Use(std::shared_ptr<Run> run, std::int64_t rank) {
    run_ = std::move(run);
    rank_ = rank;
  }

  // Takes the chunks of a message in their order: opens slices that this stream has not yet, and
  // copies the payloads. RESOURCE_EXHAUSTED for a payload above the daemon's limit.
  absl::Status Take(const ChunkMessage& message, const Opener& open, const Closer& close);
  // Likewise what the trainer has put into a window of its arena; then the window is its own again.
  // Errors also those of Arena and ArenaTable::Find.
  absl::Status Take(const v1::ArenaFill& fill, const Opener& open, const Closer& close);

  // The stream ended: INVALID_ARGUMENT naming the first slice that is not complete.
  absl::Status CheckNoneOpen() const;
  // Gives unfinished slices up.
  void AbandonAll();
  // Counts a stream's refusal under the reason that metrics know.
  void CountError(const absl::Status& status) const;

  std::int64_t bytes() const { return bytes_; }  // of all payloads so far

 private:
  absl::Status TakeChunk(const v1::Chunk& header, std::span<const std::string_view> payload,
                         const Opener& open, const Closer& close);
  absl::Status CheckBytes(const v1::Chunk& header, std::int64_t bytes) const;
  absl::StatusOr<Dtype> DtypeOf(const v1::Chunk& header) const;

  using Key = std::tuple<std::string, std::int64_t, std::int64_t>;  // parameter, slice, micro-batch
  const RpcContext& rpc_;
  TransportPath path_;
  std::shared_ptr<Run> run_;
  std::int64_t rank_ = 0;
  std::int64_t bytes_ = 0;
  std::map<Key, OpenSlice> open_;
  std::shared_ptr<Arena> arena_;  // that the stream used last
};

// The path of a call's own messages.
TransportPath PathOf(const grpc::CallbackServerContext& context);

}  // namespace muond
