#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "grpcpp/alarm.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/grpc_deadline.h"
#include "proto/steady_time.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

// One waiting call: the run's answer, the deadline and the caller's going away race for it.
class AddCall final : public grpc::ServerUnaryReactor {
 public:
  AddCall(grpc::CallbackServerContext* context, std::shared_ptr<Run> run,
          v1::AddParametersReply* reply)
      : shared_(std::make_shared<Shared>()) {
    shared_->call = this;
    shared_->context = context;
    shared_->run = std::move(run);
    shared_->reply = reply;
  }

  // What is to be done on a thread that may wait. Outlives the call: it may be answered before.
  std::function<void()> Job(const v1::AddParametersRequest& request, ParameterAddition wanted,
                            absl::Time deadline) {
    return [shared = shared_, wanted = std::move(wanted), rank = request.rank(),
            generation = request.id().generation(),
            first = static_cast<std::size_t>(request.first()), deadline] {
      if (!shared->answered) shared->Ask(rank, generation, first, wanted, deadline);
    };
  }

  void OnCancel() override {
    shared_->Answer(absl::CancelledError("the caller went away"));
    shared_->run->AdditionGone(shared_->waiter);
  }
  void OnDone() override { delete this; }

 private:
  struct Shared : std::enable_shared_from_this<Shared> {
    AddCall* call = nullptr;
    grpc::CallbackServerContext* context = nullptr;
    std::shared_ptr<Run> run;
    v1::AddParametersReply* reply = nullptr;
    std::atomic<std::uint64_t> waiter{0};
    std::atomic<bool> answered{false};
    grpc::Alarm alarm;

    void Ask(std::int64_t rank, std::int64_t generation, std::size_t first,
             const ParameterAddition& wanted, absl::Time deadline) {
      waiter = run->AddParameters(
          rank, generation, first, wanted,
          [self = shared_from_this()](const auto& answer) { self->Answer(answer); });
      // An alarm keeps its callback for life: holding `self` there would keep the call for ever.
      alarm.Set(GrpcDeadline(deadline), [weak = weak_from_this()](bool fired) {
        const auto self = fired ? weak.lock() : nullptr;
        if (self != nullptr) self->run->AdditionDeadline(self->waiter);
      });
      if (!answered) return;
      // Meanwhile, perhaps by the caller's going away.
      alarm.Cancel();
      run->AdditionGone(waiter);
    }
    void Answer(const absl::StatusOr<AdditionAnswer>& answer) {
      if (answered.exchange(true)) return;
      alarm.Cancel();
      if (answer.ok()) {
        reply->set_addition(answer->name);
        reply->set_adopted(answer->adopted);
      }
      call->Finish(muond::Answer(context, answer.status(), run.get()));
    }
  };
  std::shared_ptr<Shared> shared_;
};

absl::StatusOr<ParameterAddition> WantedBy(const v1::AddParametersRequest& request) {
  ParameterAddition wanted;
  for (const v1::Group& group : request.groups()) {
    MUOND_ASSIGN_OR_RETURN(wanted.groups.emplace_back(), FromProto(group));
  }
  for (const v1::Parameter& parameter : request.parameters()) {
    MUOND_ASSIGN_OR_RETURN(wanted.parameters.emplace_back(), FromProto(parameter));
  }
  MUOND_ASSIGN_OR_RETURN(wanted.slices, SlicesFromProto(request.slices()));
  if (request.first() < 1 || request.wait_ms() < 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "run \"%s\": add parameters: expected first of 1 or more and wait_ms of 0 or more, got %d, "
        "%d",
        request.id().run(), request.first(), request.wait_ms()));
  }
  return wanted;
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::AddParameters(grpc::CallbackServerContext* context,
                                                          const v1::AddParametersRequest* request,
                                                          v1::AddParametersReply* reply) {
  const auto found = FindRun(*context, *context_.runs, request->id().run());
  if (!found.ok()) return AnswerNow(context, found.status(), nullptr);
  const std::shared_ptr<Run> run = *found;
  auto wanted = WantedBy(*request);
  if (!wanted.ok()) return AnswerNow(context, wanted.status(), run.get());
  const absl::Duration limit = context_.step_deadline;
  const absl::Duration wait =
      request->wait_ms() > 0 ? std::min(absl::Milliseconds(request->wait_ms()), limit) : limit;
  auto* call = new AddCall(context, run, reply);
  context_.peer_executor->Post(call->Job(*request, *std::move(wanted), SteadyNow() + wait));
  return call;
}

}  // namespace muond
