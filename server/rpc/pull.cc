#include <memory>

#include "absl/strings/str_format.h"
#include "proto/convert.h"
#include "proto/crc32c.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"

namespace muond {
namespace {

constexpr std::int64_t kDefaultChunkBytes = std::int64_t{1} << 20;

// Reads a chunk, writes it, reads the next. The executor fills the reply while nothing is being
// written, so one message at a time exists.
class PullStream final : public grpc::ServerWriteReactor<v1::PullReply> {
 public:
  PullStream(grpc::CallbackServerContext* context, const RpcContext& rpc,
             const v1::PullRequest& request)
      : context_(context), rpc_(rpc), version_(request.version()) {
    const absl::Status status = Resolve(request);
    if (status.ok()) {
      Next();
    } else {
      Finish(Answer(context_, status, run_.get()));
    }
  }

  void OnWriteDone(bool ok) override {
    if (ok) {
      Next();
    } else {
      Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the caller went away"));
    }
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Resolve(const v1::PullRequest& request) {
    auto run = rpc_.runs->Find(request.id().run());
    if (!run.ok()) return run.status();
    run_ = *std::move(run);
    if (request.chunk_bytes() < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("run \"%s\": pull: chunk_bytes: expected 0 or more, got %d", run_->name(),
                          request.chunk_bytes()));
    }
    chunk_bytes_ = std::min(request.chunk_bytes() == 0 ? kDefaultChunkBytes : request.chunk_bytes(),
                            rpc_.max_chunk_bytes);
    chunk_bytes_ = std::max<std::int64_t>(chunk_bytes_ / 4 * 4, 4);
    auto boxes = SlicesFromProto(request.slices());
    if (!boxes.ok()) return boxes.status();
    auto slices = run_->CheckPull(request.rank(), request.id().generation(), version_, *boxes,
                                  request.master());
    if (!slices.ok()) return slices.status();
    slices_ = *std::move(slices);
    return absl::OkStatus();
  }

  void Next() {
    if (slice_ < slices_.size() && sent_ == slices_[slice_].range.count) {
      ++slice_;
      sent_ = 0;
    }
    if (slice_ == slices_.size()) return Finish(grpc::Status::OK);
    const PullSlice& slice = slices_[slice_];
    const auto size = static_cast<std::int64_t>(DtypeBytes(slice.dtype));
    const std::int64_t first = slice.range.first + sent_;
    count_ = std::min(chunk_bytes_ / size, slice.range.count - sent_);
    reply_.set_version(version_);
    v1::Chunk* chunk = reply_.mutable_chunk();
    chunk->set_parameter(slice.name);
    chunk->set_slice(slice.slice);
    chunk->set_dtype(ToProto(slice.dtype));
    chunk->set_offset(first);
    std::string* data = chunk->mutable_data();
    data->resize(count_ * size);
    run_->Read(slice, version_, first, count_, data->data(),
               [this](const absl::Status& status) { Send(status); });
  }

  void Send(const absl::Status& status) {
    if (!status.ok()) return Finish(Answer(context_, status, run_.get()));
    v1::Chunk* chunk = reply_.mutable_chunk();
    chunk->set_crc32c(Crc32c(chunk->data().data(), chunk->data().size()));
    sent_ += count_;
    rpc_.metrics->OnTransfer(TransportPath::kGrpc, TransportDirection::kSent, chunk->data().size());
    StartWrite(&reply_);
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  std::shared_ptr<Run> run_;
  const std::int64_t version_;
  std::int64_t chunk_bytes_ = kDefaultChunkBytes;
  std::vector<PullSlice> slices_;
  std::size_t slice_ = 0;   // being sent
  std::int64_t sent_ = 0;   // elements of its range
  std::int64_t count_ = 0;  // elements of the chunk in hand
  v1::PullReply reply_;
};

}  // namespace

grpc::ServerWriteReactor<v1::PullReply>* OptimizerService::Pull(
    grpc::CallbackServerContext* context, const v1::PullRequest* request) {
  return new PullStream(context, context_, *request);
}

}  // namespace muond
