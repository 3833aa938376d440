// A trainer that speaks the protocol message by message and checks nothing itself: for requests
// that the client library would refuse to send, cut differently, or send again by itself.
//
// Every call has a deadline of a minute and returns the daemon's own status.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/values.h"
#include "server/daemon/embedded.h"

namespace muond::cluster {

class RawTrainer {
 public:
  RawTrainer(std::shared_ptr<grpc::Channel> channel, std::string run, std::int64_t rank = 0,
             std::int64_t generation = 1);
  // Through the in-process channel.
  RawTrainer(Service& service, std::string run, std::int64_t rank = 0, std::int64_t generation = 1)
      : RawTrainer(service.channel(), std::move(run), rank, generation) {}

  v1::RunId id() const;

  absl::StatusOr<v1::RegisterReply> Register(const v1::RegisterRequest& request);
  // A register request as a correct trainer of this rank would send it.
  v1::RegisterRequest RegisterRequestOf(const RunSpec& spec, const RankSlices& slices) const;

  // Streams the chunks; the first message carries who sends them, also when there are no chunks.
  absl::StatusOr<v1::InitializeReply> Initialize(const std::vector<v1::Chunk>& chunks);
  absl::StatusOr<v1::PushReply> Push(std::int64_t step, const std::vector<v1::Chunk>& chunks);

  // Of this rank; `loss_scale` 0 is left to the daemon.
  v1::BeginRequest BeginRequestOf(std::int64_t step, double loss_scale = 0) const;
  absl::Status Begin(const v1::BeginRequest& request);
  absl::Status Begin(std::int64_t step, double loss_scale = 0) {
    return Begin(BeginRequestOf(step, loss_scale));
  }
  absl::StatusOr<v1::StepOutcome> Finish(std::int64_t step,
                                         const std::vector<std::string>& absent = {},
                                         std::int64_t wait_ms = 0);
  absl::StatusOr<v1::StepOutcome> Skip(std::int64_t step, v1::SkipCause cause,
                                       double loss_scale = 0);
  // The values of all chunks that came, in their order.
  absl::StatusOr<std::vector<v1::PullReply>> Pull(const v1::PullRequest& request);
  absl::StatusOr<v1::CloseReply> Close();

  // The position that came with the last refusal; missing when there was none.
  const std::optional<v1::RunPosition>& position() const { return position_; }

 private:
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(grpc::Status (v1::Optimizer::Stub::*method)(grpc::ClientContext*,
                                                                         const Request&, Reply*),
                             const Request& request);
  absl::Status Told(const grpc::Status& status, const grpc::ClientContext& context);

  std::unique_ptr<v1::Optimizer::Stub> stub_;
  std::string run_;
  std::int64_t rank_, generation_;
  std::optional<v1::RunPosition> position_;
};

// A chunk with its checksum; `bytes` as BoxBytes gives them.
v1::Chunk ChunkOf(const std::string& parameter, std::int64_t slice, std::int64_t offset,
                  std::string bytes, v1::Dtype dtype = v1::DTYPE_F32);
// The whole slice in chunks of at most `chunk_bytes`.
std::vector<v1::Chunk> ChunksOf(const std::string& parameter, std::int64_t slice,
                                const std::string& bytes, std::int64_t chunk_bytes,
                                Dtype dtype = Dtype::kF32);
// fp32 values as bytes.
std::string Bytes(const std::vector<float>& values);

}  // namespace muond::cluster
