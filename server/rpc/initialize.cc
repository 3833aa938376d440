#include <memory>
#include <mutex>

#include "server/rpc/answer.h"
#include "server/rpc/incoming_slices.h"
#include "server/rpc/optimizer_service.h"

namespace muond {
namespace {

// Slices that the executor has not yet written, at most: bounds what a fast stream can pile up.
constexpr int kPendingMax = 8;

// Like a push, but each slice is answered by the executor: the stream's answer waits for all.
class InitializeStream final : public grpc::ServerReadReactor<v1::InitializeRequest> {
 public:
  InitializeStream(grpc::CallbackServerContext* context, const RpcContext& rpc,
                   v1::InitializeReply* reply)
      : context_(context), rpc_(rpc), reply_(reply) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    const absl::Status status = ok ? Take() : slices_.CheckNoneOpen();
    Decide([&] {
      if (!status.ok() && status_.ok()) status_ = status;
      reading_ = ok && status_.ok();
      paused_ = reading_ && pending_ >= kPendingMax;
      return reading_ && !paused_;
    });
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Take() {
    if (run_ == nullptr) {
      auto run = rpc_.runs->Find(request_.id().run());
      if (!run.ok()) return run.status();
      run_ = *std::move(run);
      generation_ = request_.id().generation();
      slices_.Use(run_, request_.rank(), rpc_.max_chunk_bytes);
    }
    // A rank that holds nothing sends one message without a chunk: who opened the stream.
    if (!request_.has_chunk()) return absl::OkStatus();
    const v1::Chunk& chunk = request_.chunk();
    rpc_.metrics->OnTransfer(TransportPath::kGrpc, TransportDirection::kReceived,
                             chunk.data().size());
    auto slice = slices_.Take(chunk, [this](const SliceAddress& address, Dtype dtype) {
      return run_->OpenInitial(address, generation_, dtype);
    });
    if (!slice.ok()) return slice.status();
    if (!*slice) return absl::OkStatus();
    {
      std::lock_guard lock(mutex_);
      ++pending_;
    }
    run_->CloseInitial(**slice, [this](const absl::StatusOr<SliceArrival>& arrival) {
      Decide([&] {
        --pending_;
        if (!arrival.ok()) {
          if (status_.ok()) status_ = arrival.status();
        } else if (*arrival == SliceArrival::kAccepted) {
          reply_->set_slices_accepted(reply_->slices_accepted() + 1);
        } else {
          reply_->set_slices_duplicate(reply_->slices_duplicate() + 1);
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
    {
      std::lock_guard lock(mutex_);
      read = change();
      end = !read && !reading_ && pending_ == 0 && !ended_;
      ended_ = ended_ || end;
    }
    if (read) StartRead(&request_);
    if (end) End();
  }

  void End() {
    slices_.AbandonAll();
    CountError(rpc_.metrics, status_);
    if (status_.ok() && run_ != nullptr) {
      const Run::InitialProgress progress = run_->initial_progress();
      reply_->set_complete(progress.complete);
      for (const std::string& name : progress.missing) reply_->add_missing(name);
    }
    Finish(Answer(context_, status_, run_.get()));
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  v1::InitializeReply* const reply_;
  v1::InitializeRequest request_;
  std::shared_ptr<Run> run_;
  std::int64_t generation_ = 0;
  IncomingSlices slices_;

  std::mutex mutex_;  // of what follows: reads and the executor come on different threads
  int pending_ = 0;
  bool reading_ = true;  // a read is under way or will be started
  bool paused_ = false;
  bool ended_ = false;
  absl::Status status_;
};

}  // namespace

grpc::ServerReadReactor<v1::InitializeRequest>* OptimizerService::Initialize(
    grpc::CallbackServerContext* context, v1::InitializeReply* reply) {
  return new InitializeStream(context, context_, reply);
}

}  // namespace muond
