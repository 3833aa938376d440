#include "server/rpc/pull_plan.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

constexpr std::int64_t kDefaultChunkBytes = std::int64_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<PullPlan>> PullPlan::Make(const RpcContext& rpc,
                                                         const grpc::CallbackServerContext& call,
                                                         const v1::PullRequest& request,
                                                         std::shared_ptr<Run>* run) {
  MUOND_ASSIGN_OR_RETURN(*run, FindRun(call, *rpc.runs, request.id().run()));
  if (request.chunk_bytes() < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": pull: chunk_bytes: expected 0 or more, got %d",
                        (*run)->name(), request.chunk_bytes()));
  }
  std::unique_ptr<PullPlan> plan(new PullPlan());
  plan->version_ = request.version();
  const std::int64_t wanted =
      request.chunk_bytes() == 0 ? kDefaultChunkBytes : request.chunk_bytes();
  plan->chunk_bytes_ =
      std::max<std::int64_t>(std::min(wanted, rpc.max_chunk_bytes) / 4 * 4, 4);
  MUOND_ASSIGN_OR_RETURN(const RankSlices boxes, SlicesFromProto(request.slices()));
  MUOND_ASSIGN_OR_RETURN(plan->slices_,
                         (*run)->CheckPull(request.rank(), request.id().generation(),
                                           plan->version_, boxes, request.master()));
  plan->SkipSent();
  return plan;
}

void PullPlan::SkipSent() {
  while (slice_ < slices_.size() && sent_ == slices_[slice_].range.count) {
    ++slice_;
    sent_ = 0;
  }
}

std::optional<PullPiece> PullPlan::Next(std::int64_t room) {
  if (done()) return std::nullopt;
  const PullSlice& slice = slices_[slice_];
  const auto size = static_cast<std::int64_t>(DtypeBytes(slice.dtype));
  const std::int64_t count = std::min(chunk_bytes_ / size, slice.range.count - sent_);
  if (count * size > room) return std::nullopt;
  const PullPiece piece{&slice, slice.range.first + sent_, count};
  sent_ += count;
  SkipSent();
  return piece;
}

v1::Chunk PullPlan::HeaderOf(const PullPiece& piece) {
  v1::Chunk header;
  header.set_parameter(piece.slice->name);
  header.set_slice(piece.slice->slice);
  header.set_dtype(ToProto(piece.slice->dtype));
  header.set_offset(piece.first);
  return header;
}

}  // namespace muond
