// Finish and Skip: the calls that wait for the other ranks and the verdict.
#include <atomic>
#include <functional>
#include <memory>

#include "absl/strings/str_format.h"
#include "grpcpp/alarm.h"
#include "proto/convert.h"
#include "proto/grpc_deadline.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

// One waiting call. Outcome, deadline and cancellation race for the answer; the first one wins.
class WaitingCall final : public grpc::ServerUnaryReactor {
 public:
  WaitingCall(grpc::CallbackServerContext* context, std::shared_ptr<Run> run, FaultInjector* faults,
              v1::FinishReply* reply)
      : shared_(std::make_shared<Shared>()) {
    shared_->call = this;
    shared_->context = context;
    shared_->run = std::move(run);
    shared_->faults = faults;
    shared_->reply = reply;
  }

  // `ask` hands the run a callback and returns the waiter's name.
  void Start(const std::function<std::uint64_t(Run&, OutcomeCallback)>& ask, absl::Duration wait) {
    auto shared = shared_;
    const std::uint64_t waiter =
        ask(*shared->run, [shared](const absl::Status& status, const auto& outcome) {
          shared->Answer(status, outcome);
        });
    shared->waiter = waiter;
    // From here on `this` may be gone: the answer can have come already. An alarm keeps its
    // callback for life: holding `shared` there would keep call and run for ever.
    shared->alarm.Set(GrpcDeadlineIn(wait),
                      [weak = std::weak_ptr<Shared>(shared)](bool fired) {
                        const auto waiting = fired ? weak.lock() : nullptr;
                        if (waiting != nullptr) waiting->run->Deadline(waiting->waiter);
                      });
    if (shared->answered) shared->alarm.Cancel();
  }

  void OnCancel() override {
    shared_->run->WaiterGone(shared_->waiter);
    shared_->Answer(absl::CancelledError("the caller went away"), std::nullopt);
  }
  void OnDone() override { delete this; }

 private:
  // Outlives the call: the run's callback and the alarm may come after it.
  struct Shared {
    WaitingCall* call = nullptr;
    grpc::CallbackServerContext* context = nullptr;
    std::shared_ptr<Run> run;
    FaultInjector* faults = nullptr;
    v1::FinishReply* reply = nullptr;
    std::atomic<std::uint64_t> waiter{0};
    std::atomic<bool> answered{false};
    grpc::Alarm alarm;

    void Answer(const absl::Status& status, const std::optional<StepOutcome>& outcome) {
      if (answered.exchange(true)) return;
      alarm.Cancel();
      if (outcome) *reply->mutable_outcome() = ToProto(*outcome);
      absl::Status said = status;
      if (said.ok()) faults->StopHere(FaultPoint::kStopBeforeFinishReply);
      if (said.ok() && faults->Fire(FaultPoint::kDropFinishReply)) {
        said = absl::UnavailableError("injected fault: the reply was lost");
      }
      call->Finish(muond::Answer(context, said, run.get()));
    }
  };
  std::shared_ptr<Shared> shared_;
};

// The wait that the caller asked for, within the daemon's own limit.
absl::Duration WaitOf(std::int64_t wait_ms, absl::Duration limit) {
  return wait_ms > 0 ? std::min(absl::Milliseconds(wait_ms), limit) : limit;
}

absl::Status CheckWait(const std::string& run, std::int64_t wait_ms) {
  if (wait_ms >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("run \"%s\": wait_ms: expected 0 or more, got %d", run, wait_ms));
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::Finish(grpc::CallbackServerContext* context,
                                                   const v1::FinishRequest* request,
                                                   v1::FinishReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  if (absl::Status wait = CheckWait((*run)->name(), request->wait_ms()); !wait.ok()) {
    return AnswerNow(context, wait, run->get());
  }
  auto* call = new WaitingCall(context, *run, context_.faults, reply);
  const std::vector<std::string> absent(request->absent().begin(), request->absent().end());
  call->Start(
      [&](Run& target, OutcomeCallback done) {
        return target.Finish(request->rank(), request->id().generation(), request->step(), absent,
                             std::move(done));
      },
      WaitOf(request->wait_ms(), context_.step_deadline));
  return call;
}

grpc::ServerUnaryReactor* OptimizerService::Skip(grpc::CallbackServerContext* context,
                                                 const v1::SkipRequest* request,
                                                 v1::FinishReply* reply) {
  const auto run = FindRun(*context, *context_.runs, request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  const auto cause = FromProto(request->cause());
  if (!cause.ok()) return AnswerNow(context, cause.status(), run->get());
  if (absl::Status wait = CheckWait((*run)->name(), request->wait_ms()); !wait.ok()) {
    return AnswerNow(context, wait, run->get());
  }
  auto* call = new WaitingCall(context, *run, context_.faults, reply);
  call->Start(
      [&](Run& target, OutcomeCallback done) {
        return target.Skip(request->rank(), request->id().generation(), request->step(), *cause,
                           request->loss_scale(), std::move(done));
      },
      WaitOf(request->wait_ms(), context_.step_deadline));
  return call;
}

}  // namespace muond
