// The slices that one stream is sending, by the name that its chunks give them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "server/metrics/daemon_metrics.h"
#include "server/run/run.h"

namespace muond {

class IncomingSlices {
 public:
  using Opener = std::function<absl::StatusOr<OpenSlice>(const SliceAddress&, Dtype)>;

  void Use(std::shared_ptr<Run> run, std::int64_t rank, std::int64_t max_chunk_bytes) {
    run_ = std::move(run);
    rank_ = rank;
    max_chunk_bytes_ = max_chunk_bytes;
  }

  // Takes a chunk: opens its slice if this stream has not yet, and copies the payload. Returns the
  // slice once it is complete, nothing while more of it is to come. RESOURCE_EXHAUSTED for a
  // payload above the daemon's limit.
  absl::StatusOr<std::optional<OpenSlice>> Take(const v1::Chunk& chunk, const Opener& open);

  // The stream ended: INVALID_ARGUMENT naming the first slice that is not complete.
  absl::Status CheckNoneOpen() const;
  // Gives unfinished slices up.
  void AbandonAll();

 private:
  using Key = std::tuple<std::string, std::int64_t, std::int64_t>;  // parameter, slice, micro-batch
  std::shared_ptr<Run> run_;
  std::int64_t rank_ = 0;
  std::int64_t max_chunk_bytes_ = 0;
  std::map<Key, OpenSlice> open_;
};

// Counts a stream's refusal under the reason that metrics know: checksum, no memory, protocol.
void CountError(DaemonMetrics* metrics, const absl::Status& status);

}  // namespace muond
