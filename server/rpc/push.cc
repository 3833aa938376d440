#include <map>
#include <memory>
#include <tuple>

#include "absl/strings/str_format.h"
#include "server/rpc/answer.h"
#include "server/rpc/incoming_slices.h"
#include "server/rpc/optimizer_service.h"

namespace muond {
namespace {

// Chunks are copied to their place on the thread that received them.
class PushStream final : public grpc::ServerReadReactor<v1::PushRequest> {
 public:
  PushStream(grpc::CallbackServerContext* context, const RpcContext& rpc, v1::PushReply* reply)
      : context_(context), rpc_(rpc), reply_(reply) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(slices_.CheckNoneOpen());
    const absl::Status status = Take();
    if (!status.ok()) return End(status);
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Take() {
    if (run_ == nullptr) {
      auto run = rpc_.runs->Find(request_.id().run());
      if (!run.ok()) return run.status();
      run_ = *std::move(run);
      generation_ = request_.id().generation();
      step_ = request_.step();
      rank_ = request_.rank();
      slices_.Use(run_, rank_, rpc_.max_chunk_bytes);
    }
    // A rank that holds nothing sends one message without a chunk: who opened the stream.
    if (!request_.has_chunk()) return absl::OkStatus();
    const v1::Chunk& chunk = request_.chunk();
    rpc_.metrics->OnTransfer(TransportPath::kGrpc, TransportDirection::kReceived,
                             chunk.data().size());
    reply_->set_bytes(reply_->bytes() + chunk.data().size());
    auto slice = slices_.Take(chunk, [this](const SliceAddress& address, Dtype dtype) {
      return run_->OpenGradient(address, generation_, step_, dtype);
    });
    if (!slice.ok()) return slice.status();
    if (!*slice) return absl::OkStatus();  // more of it to come
    const auto arrival = run_->CloseGradient(**slice);
    if (!arrival.ok()) return arrival.status();
    if (*arrival == SliceArrival::kAccepted) {
      reply_->set_slices_accepted(reply_->slices_accepted() + 1);
    } else {
      reply_->set_slices_duplicate(reply_->slices_duplicate() + 1);
    }
    return absl::OkStatus();
  }

  void End(absl::Status status) {
    slices_.AbandonAll();
    CountError(rpc_.metrics, status);
    if (status.ok() && rpc_.faults->Fire(FaultPoint::kDropPushReply)) {
      status = absl::UnavailableError("injected fault: the reply was lost");
    }
    Finish(Answer(context_, status, run_.get()));
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  v1::PushReply* const reply_;
  v1::PushRequest request_;
  std::shared_ptr<Run> run_;
  std::int64_t generation_ = 0, step_ = 0, rank_ = 0;
  IncomingSlices slices_;
};

}  // namespace

grpc::ServerReadReactor<v1::PushRequest>* OptimizerService::Push(
    grpc::CallbackServerContext* context, v1::PushReply* reply) {
  return new PushStream(context, context_, reply);
}

}  // namespace muond
