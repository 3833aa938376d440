#include <atomic>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "grpc/slice.h"
#include "proto/check.h"
#include "proto/chunk_message.h"
#include "proto/mutex.h"
#include "server/rpc/answer.h"
#include "server/rpc/incoming_slices.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/pull_plan.h"

namespace muond {
namespace {

// Pieces that share a message, at most: bounds its headers.
constexpr std::size_t kPiecesMax = 128;

// While one message is written, the executor reads the pieces of the next.
class PullStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  PullStream(grpc::CallbackServerContext* context, const RpcContext& rpc,
             const grpc::ByteBuffer& request)
      : context_(context), rpc_(rpc), path_(PathOf(*context)) {
    const absl::Status status = Resolve(request);
    if (status.ok()) {
      Advance([] {});
    } else {
      Finish(Answer(context_, status, run_.get()));
    }
  }

  void OnWriteDone(bool ok) override {
    Advance([&]() MUOND_REQUIRES(mutex_) {
      writing_ = false;
      if (!ok && status_.ok()) status_ = absl::CancelledError("the caller went away");
    });
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Resolve(const grpc::ByteBuffer& buffer) {
    v1::PullRequest request;
    MUOND_RETURN_IF_ERROR(DecodeRequest(buffer, {}, &request).status());
    MUOND_ASSIGN_OR_RETURN(plan_, PullPlan::Make(rpc_, *context_, request, &run_));
    batch_ = request.batch();
    return absl::OkStatus();
  }

  // Changes the stream's state under its lock, then starts what the new state allows.
  template <typename Change>
  void Advance(Change change) {
    bool write = false, read = false, end = false;
    absl::Status status;
    {
      MutexLock lock(mutex_);
      change();
      if (status_.ok() && ready_ && !writing_) {
        message_ = *std::exchange(ready_, std::nullopt);
        write = writing_ = true;
      }
      if (status_.ok() && !reading_ && !ready_ && !plan_->done()) read = reading_ = true;
      end = !writing_ && !reading_ && !ended_;
      ended_ = ended_ || end;
      if (end) status = status_;
    }
    // A read that is under way keeps the stream; after the write alone it may be gone.
    if (read && write) {
      StartWrite(&message_);
      return Read();
    }
    if (write) return StartWrite(&message_);
    if (read) return Read();
    if (end) Finish(Answer(context_, status, run_.get()));
  }

  // The pieces of the next message: one, or as many small ones as fit.
  void Read() {
    pieces_.clear();
    std::int64_t room = plan_->chunk_bytes();
    while (auto piece = plan_->Next(room)) {
      // Never inside the slice object itself, which moves while the executor writes to it.
      const auto bytes = static_cast<std::size_t>(piece->bytes());
      pieces_.push_back(
          {*piece, grpc::Slice(grpc_slice_malloc_large(bytes), grpc::Slice::STEAL_REF)});
      room -= piece->bytes();
      if (!batch_ || pieces_.size() == kPiecesMax) break;
    }
    missing_ = pieces_.size();
    {
      MutexLock lock(mutex_);
      failure_ = absl::OkStatus();
    }
    // The last answer may come before this loop has ended: it frees what the loop uses.
    const std::vector<Piece> pieces = pieces_;
    const std::shared_ptr<Run> run = run_;
    const std::int64_t version = plan_->version();
    for (const Piece& piece : pieces) {
      run->Read(*piece.piece.slice, version, piece.piece.first, piece.piece.count,
                const_cast<std::uint8_t*>(piece.payload.begin()),
                [this](const absl::Status& status) { OnPiece(status); });
    }
  }

  void OnPiece(const absl::Status& status) {
    if (!status.ok()) {
      MutexLock lock(mutex_);
      if (failure_.ok()) failure_ = status;
    }
    if (missing_.fetch_sub(1) > 1) return;
    std::optional<grpc::ByteBuffer> message;
    if (failure().ok()) message = Encode();
    Advance([&]() MUOND_REQUIRES(mutex_) {
      reading_ = false;
      if (!failure_.ok() && status_.ok()) status_ = failure_;
      ready_ = std::move(message);
    });
  }

  absl::Status failure() {
    MutexLock lock(mutex_);
    return failure_;
  }

  grpc::ByteBuffer Encode() const {
    v1::PullReply head;
    head.set_version(plan_->version());
    std::vector<SentChunk> chunks;
    for (const Piece& piece : pieces_) {
      const int field =
          chunks.empty() ? v1::PullReply::kChunkFieldNumber : v1::PullReply::kMoreFieldNumber;
      chunks.push_back({field, PullPlan::HeaderOf(piece.piece), piece.payload});
      rpc_.metrics->OnTransfer(path_, TransportDirection::kSent, piece.piece.bytes());
    }
    return EncodeChunks(head, chunks);
  }

  struct Piece {
    PullPiece piece;
    grpc::Slice payload;
  };
  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  const TransportPath path_;
  std::shared_ptr<Run> run_;
  std::unique_ptr<PullPlan> plan_;  // used by whoever reads
  bool batch_ = false;
  std::vector<Piece> pieces_;             // being read
  std::atomic<std::size_t> missing_ = 0;  // of them
  Mutex mutex_;
  absl::Status failure_ MUOND_GUARDED_BY(mutex_);  // of the first that could not be read
  grpc::ByteBuffer message_;              // being written

  bool reading_ MUOND_GUARDED_BY(mutex_) = false;
  bool writing_ MUOND_GUARDED_BY(mutex_) = false;
  bool ended_ MUOND_GUARDED_BY(mutex_) = false;
  std::optional<grpc::ByteBuffer> ready_ MUOND_GUARDED_BY(mutex_);  // read, not written yet
  absl::Status status_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* OptimizerService::Pull(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  return new PullStream(context, context_, *request);
}

}  // namespace muond
