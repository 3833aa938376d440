#include <memory>

#include "proto/check.h"
#include "proto/chunk_message.h"
#include "proto/mutex.h"
#include "server/rpc/answer.h"
#include "server/rpc/incoming_slices.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

// Slices that the executor has not yet written, at most: bounds what a fast stream can pile up.
constexpr int kPendingMax = 8;
constexpr int kChunkFields[] = {v1::InitializeRequest::kChunkFieldNumber};

// Like a push, but each slice is answered by the executor: the stream's answer waits for all.
class InitializeStream final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  InitializeStream(grpc::CallbackServerContext* context, const RpcContext& rpc,
                   grpc::ByteBuffer* reply)
      : context_(context), rpc_(rpc), reply_buffer_(reply), slices_(rpc, *context) {
    StartRead(&message_);
  }

  void OnReadDone(bool ok) override {
    const absl::Status status = ok ? Take() : slices_.CheckNoneOpen();
    Decide([&]() MUOND_REQUIRES(mutex_) {
      if (!status.ok() && status_.ok()) status_ = status;
      reading_ = ok && status_.ok();
      paused_ = reading_ && pending_ >= kPendingMax;
      return reading_ && !paused_;
    });
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Take() {
    v1::InitializeRequest head;
    MUOND_ASSIGN_OR_RETURN(const ChunkMessage message,
                           DecodeRequest(message_, kChunkFields, &head));
    if (run_ == nullptr) {
      MUOND_ASSIGN_OR_RETURN(run_, FindRun(*context_, *rpc_.runs, head.id().run()));
      generation_ = head.id().generation();
      slices_.Use(run_, head.rank());
    }
    // A rank that holds nothing sends one message without a chunk: who opened the stream.
    const auto open = [this](const SliceAddress& address, Dtype dtype) {
      return run_->OpenInitial(address, generation_, dtype);
    };
    const auto close = [this](const OpenSlice& slice) { return Close(slice); };
    MUOND_RETURN_IF_ERROR(slices_.Take(message, open, close));
    return head.has_fill() ? slices_.Take(head.fill(), open, close) : absl::OkStatus();
  }

  absl::Status Close(const OpenSlice& slice) {
    {
      MutexLock lock(mutex_);
      ++pending_;
    }
    run_->CloseInitial(slice, [this](const absl::StatusOr<SliceArrival>& arrival) {
      Decide([&]() MUOND_REQUIRES(mutex_) {
        --pending_;
        if (!arrival.ok()) {
          if (status_.ok()) status_ = arrival.status();
        } else if (*arrival == SliceArrival::kAccepted) {
          reply_.set_slices_accepted(reply_.slices_accepted() + 1);
        } else {
          reply_.set_slices_duplicate(reply_.slices_duplicate() + 1);
        }
        const bool resume = paused_;
        paused_ = false;
        return resume;
      });
    });
    return absl::OkStatus();
  }

  // Changes the stream's state under its lock, then reads on or, when nothing is left to come from
  // either side, answers. `change` returns whether to read on.
  template <typename Change>
  void Decide(Change change) {
    bool read = false, end = false;
    absl::Status status;
    {
      MutexLock lock(mutex_);
      read = change();
      end = !read && !reading_ && pending_ == 0 && !ended_;
      ended_ = ended_ || end;
      status = status_;
    }
    if (read) {
      message_.Clear();
      StartRead(&message_);
    }
    if (end) End(status);
  }

  void End(const absl::Status& status) {
    slices_.AbandonAll();
    slices_.CountError(status);
    if (status.ok() && run_ != nullptr) {
      const Run::InitialProgress progress = run_->initial_progress();
      reply_.set_complete(progress.complete);
      for (const std::string& name : progress.missing) reply_.add_missing(name);
    }
    *reply_buffer_ = ToBuffer(reply_);
    Finish(Answer(context_, status, run_.get()));
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  grpc::ByteBuffer* const reply_buffer_;
  v1::InitializeReply reply_;
  grpc::ByteBuffer message_;
  std::shared_ptr<Run> run_;
  std::int64_t generation_ = 0;
  IncomingSlices slices_;

  Mutex mutex_;  // reads and the executor come on different threads
  int pending_ MUOND_GUARDED_BY(mutex_) = 0;
  bool reading_ MUOND_GUARDED_BY(mutex_) = true;  // a read is under way or will be started
  bool paused_ MUOND_GUARDED_BY(mutex_) = false;
  bool ended_ MUOND_GUARDED_BY(mutex_) = false;
  absl::Status status_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerReadReactor<grpc::ByteBuffer>* OptimizerService::Initialize(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* reply) {
  return new InitializeStream(context, context_, reply);
}

}  // namespace muond
