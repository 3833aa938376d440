// OpenPair and ClosePair: NCCL between a trainer's GPU and the daemon's.
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "proto/steady_time.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// Tells the trainer of its pair, and then waits for one of them to go away. What happens to the
// pair may be told after the call has ended: the state is shared.
class PairCall final : public grpc::ServerWriteReactor<v1::OpenPairReply> {
 public:
  PairCall(grpc::CallbackServerContext* context, const RpcContext& rpc,
           const v1::OpenPairRequest& request)
      : context_(context), rpc_(rpc), state_(std::make_shared<State>()) {
    state_->call = this;
    const absl::Status opened = Open(request);
    if (!opened.ok()) {
      End(opened);
      return;
    }
    StartWrite(&reply_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return OnCancel();
    // The id is the other seat in this communicator: it stays nowhere.
    reply_.clear_unique_id();
  }
  void OnCancel() override {
    const absl::Status gone = absl::CancelledError("the trainer is gone");
    if (pair_ != nullptr) rpc_.pairs->CloseHandle(pair_->handle(), pair_->owner(), gone);
    End(gone);
  }
  void OnDone() override {
    if (pair_ != nullptr) {
      rpc_.pairs->CloseHandle(pair_->handle(), pair_->owner(),
                              absl::CancelledError("the trainer has let go of it"));
    }
    delete this;
  }

 private:
  struct State {
    Mutex mutex;
    PairCall* call MUOND_GUARDED_BY(mutex) = nullptr;  // null: it has ended
  };

  absl::Status Open(const v1::OpenPairRequest& request) {
    MUOND_ASSIGN_OR_RETURN(run_, rpc_.runs->Find(request.id().run()));
    MUOND_RETURN_IF_ERROR(
        CheckMember(*run_, "NCCL pair", request.rank(), request.id().generation()));
    nccl::UniqueId id;
    auto pair = rpc_.pairs->Open(
        {run_->name(), request.rank()},
        {.nccl_version = static_cast<int>(request.nccl_version()), .gpu = request.gpu()},
        {.window_bytes = request.window_bytes(),
         .windows = request.windows(),
         .pull_bytes = request.pull_bytes()},
        &id);
    if (!pair.ok()) {
      rpc_.metrics->OnTransportError(TransportPath::kNccl,
                                     absl::IsResourceExhausted(pair.status())
                                         ? TransportError::kNoMemory
                                         : TransportError::kProtocol);
      return pair.status();
    }
    pair_ = *std::move(pair);
    const absl::Duration patience = rpc_.pairs->patience();
    pair_->Connect(id, SteadyNow() + patience, [metrics = rpc_.metrics](const absl::Status& met) {
      if (!met.ok()) metrics->OnTransportError(TransportPath::kNccl, TransportError::kTimeout);
    });
    reply_.set_handle(pair_->handle());
    reply_.set_unique_id(id.bytes, sizeof(id.bytes));
    reply_.set_nccl_version(rpc_.pairs->nccl_version());
    reply_.set_gpu(rpc_.pairs->gpu());
    reply_.set_join_within_ms(absl::ToInt64Milliseconds(patience));
    for (const ArenaWindow& window : pair_->layout().windows) {
      v1::ArenaWindow* message = reply_.add_windows();
      message->set_offset(window.offset);
      message->set_bytes(window.bytes);
      message->set_to_daemon(window.to_daemon);
    }
    pair_->OnRevoked([state = state_](const absl::Status& why) { End(*state, why); });
    return absl::OkStatus();
  }

  void End(const absl::Status& status) { End(*std::shared_ptr<State>(state_), status); }
  // Whoever takes the call out of the state ends it, without the lock: its end may revoke the pair,
  // which leads here again.
  static void End(State& state, const absl::Status& status) {
    PairCall* call = nullptr;
    {
      MutexLock lock(state.mutex);
      call = std::exchange(state.call, nullptr);
    }
    if (call != nullptr) call->Finish(Answer(call->context_, status, call->run_.get()));
  }

  grpc::CallbackServerContext* const context_;
  const RpcContext& rpc_;
  const std::shared_ptr<State> state_;
  std::shared_ptr<Run> run_;
  std::shared_ptr<Pair> pair_;
  v1::OpenPairReply reply_;
};

}  // namespace

grpc::ServerWriteReactor<v1::OpenPairReply>* OptimizerService::OpenPair(
    grpc::CallbackServerContext* context, const v1::OpenPairRequest* request) {
  return new PairCall(context, context_, *request);
}

grpc::ServerUnaryReactor* OptimizerService::ClosePair(grpc::CallbackServerContext* context,
                                                      const v1::ClosePairRequest* request,
                                                      v1::ClosePairReply*) {
  const auto run = context_.runs->Find(request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  if (!request->handle().empty()) {
    context_.pairs->CloseHandle(request->handle(), {(*run)->name(), request->rank()},
                                absl::CancelledError("the trainer has let go of it"));
  }
  if (!request->fallback().empty()) {
    context_.metrics->OnTransportFallback(request->handle().empty()
                                              ? TransportFallback::kRefused
                                              : TransportFallback::kNotAttached,
                                          TransportPath::kNccl);
    spdlog::warn("run \"{}\": rank {} goes on over gRPC, without NCCL: {}", (*run)->name(),
                 request->rank(), request->fallback().substr(0, 200));
  }
  return AnswerNow(context, absl::OkStatus(), run->get());
}

}  // namespace muond
