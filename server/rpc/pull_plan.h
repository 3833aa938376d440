// What a Pull still has to send, cut into pieces: the same for every path that sends them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "server/rpc/optimizer_service.h"
#include "server/run/run.h"

namespace muond {

// Elements [first, first + count) of a slice.
struct PullPiece {
  const PullSlice* slice = nullptr;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t bytes() const {
    return count * static_cast<std::int64_t>(DtypeBytes(slice->dtype));
  }
};

// Not thread-safe. Pieces point into it.
class PullPlan {
 public:
  // INVALID_ARGUMENT for what makes no sense, else the errors of FindRun and Run::CheckPull. `run`
  // is set as soon as it is known, for answers.
  static absl::StatusOr<std::unique_ptr<PullPlan>> Make(const RpcContext& rpc,
                                                        const grpc::CallbackServerContext& call,
                                                        const v1::PullRequest& request,
                                                        std::shared_ptr<Run>* run);

  std::int64_t version() const { return version_; }
  std::int64_t chunk_bytes() const { return chunk_bytes_; }  // of a piece, at most
  bool done() const { return slice_ == slices_.size(); }
  // The next piece, of at most `room` bytes; nothing when less than the piece (up to chunk_bytes)
  // fits there or none is left.
  std::optional<PullPiece> Next(std::int64_t room);
  // The piece as a chunk without payload.
  static v1::Chunk HeaderOf(const PullPiece& piece);

 private:
  PullPlan() = default;
  void SkipSent();

  std::int64_t version_ = 0;
  std::int64_t chunk_bytes_ = 0;
  std::vector<PullSlice> slices_;
  std::size_t slice_ = 0;  // that comes next
  std::int64_t sent_ = 0;  // elements of its range
};

}  // namespace muond
