#include <memory>

#include "proto/check.h"
#include "proto/chunk_message.h"
#include "server/rpc/answer.h"
#include "server/rpc/incoming_slices.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

constexpr int kChunkFields[] = {v1::PushRequest::kChunkFieldNumber};

// Chunks are copied to their place on the thread that received them.
class PushStream final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  PushStream(grpc::CallbackServerContext* context, const RpcContext& rpc, grpc::ByteBuffer* reply)
      : context_(context), rpc_(rpc), reply_buffer_(reply), slices_(rpc, *context) {
    StartRead(&message_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(slices_.CheckNoneOpen());
    const absl::Status status = Take();
    if (!status.ok()) return End(status);
    message_.Clear();
    StartRead(&message_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Take() {
    v1::PushRequest head;
    MUOND_ASSIGN_OR_RETURN(const ChunkMessage message,
                           DecodeRequest(message_, kChunkFields, &head));
    if (run_ == nullptr) {
      MUOND_ASSIGN_OR_RETURN(run_, FindRun(*context_, *rpc_.runs, head.id().run()));
      generation_ = head.id().generation();
      step_ = head.step();
      slices_.Use(run_, head.rank());
    }
    // A rank that holds nothing sends one message without a chunk: who opened the stream.
    const auto open = [this](const SliceAddress& address, Dtype dtype) {
      return run_->OpenGradient(address, generation_, step_, dtype);
    };
    const auto close = [this](const OpenSlice& slice) { return Close(slice); };
    MUOND_RETURN_IF_ERROR(slices_.Take(message, open, close));
    return head.has_fill() ? slices_.Take(head.fill(), open, close) : absl::OkStatus();
  }

  absl::Status Close(const OpenSlice& slice) {
    const auto arrival = run_->CloseGradient(slice);
    if (!arrival.ok()) return arrival.status();
    if (*arrival == SliceArrival::kAccepted) {
      reply_.set_slices_accepted(reply_.slices_accepted() + 1);
    } else {
      reply_.set_slices_duplicate(reply_.slices_duplicate() + 1);
    }
    return absl::OkStatus();
  }

  void End(absl::Status status) {
    slices_.AbandonAll();
    slices_.CountError(status);
    if (status.ok() && rpc_.faults->Fire(FaultPoint::kDropPushReply)) {
      status = absl::UnavailableError("injected fault: the reply was lost");
    }
    reply_.set_bytes(slices_.bytes());
    *reply_buffer_ = ToBuffer(reply_);
    Finish(Answer(context_, status, run_.get()));
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  grpc::ByteBuffer* const reply_buffer_;
  v1::PushReply reply_;
  grpc::ByteBuffer message_;
  std::shared_ptr<Run> run_;
  std::int64_t generation_ = 0, step_ = 0;
  IncomingSlices slices_;
};

}  // namespace

grpc::ServerReadReactor<grpc::ByteBuffer>* OptimizerService::Push(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* reply) {
  return new PushStream(context, context_, reply);
}

}  // namespace muond
