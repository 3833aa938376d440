// Exchange: a step, or a part of one, in one call, its slices in memory that both sides reach.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "grpcpp/alarm.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/grpc_deadline.h"
#include "proto/mutex.h"
#include "server/rpc/answer.h"
#include "server/rpc/exchange_fill.h"
#include "server/rpc/exchange_windows.h"
#include "server/rpc/optimizer_service.h"

namespace muond {
namespace {

// Where a pull writes, once it is known to make sense.
struct PullTargets {
  std::unique_ptr<ExchangeWindows> windows;
  std::vector<PullSlice> slices;
  std::vector<void*> outs;
};

class ExchangeCall final : public grpc::ServerUnaryReactor {
 public:
  // Outlives the call: the run's callbacks and the alarm may come after it.
  class Shared : public std::enable_shared_from_this<Shared> {
   public:
    Shared(ExchangeCall* call, grpc::CallbackServerContext* context, const RpcContext& rpc,
           std::shared_ptr<Run> run, const v1::ExchangeRequest* request, v1::ExchangeReply* reply)
        : call_(call),
          context_(context),
          peer_(context->peer()),
          rpc_(rpc),
          run_(std::move(run)),
          request_(*request),
          reply_out_(reply) {
      reply_.set_version(-1);
    }

    void Start() {
      if (absl::Status status = Begin(); !status.ok()) return Answer(status);
      if (absl::Status status = Fill(); !status.ok()) return Answer(status);
      if (request_.initial() && request_.has_fill()) return;  // goes on when all is written
      Go();
    }

    void Gone() {
      if (waiter_ != 0) run_->WaiterGone(waiter_);
      Answer(absl::CancelledError("the caller went away"));
    }

   private:
    absl::Status Begin() {
      if (!request_.has_begin()) return absl::OkStatus();
      v1::BeginRequest request = request_.begin();
      *request.mutable_id() = request_.id();
      request.set_step(request_.step());
      MUOND_ASSIGN_OR_RETURN(const StepBegin begin, FromProto(request));
      MUOND_RETURN_IF_ERROR(run_->Begin(request_.rank(), request_.id().generation(), begin));
      *reply_.mutable_begin()->mutable_position() = ToProto(run_->Position());
      return absl::OkStatus();
    }

    // The step was consumed already: what is left is to say so again, and to give parameters.
    bool Consumed() const {
      return request_.has_begin() && reply_.begin().position().next_step() > request_.step();
    }

    absl::Status Fill() {
      if (!request_.has_fill()) return absl::OkStatus();
      const v1::ArenaFill& fill = request_.fill();
      MUOND_ASSIGN_OR_RETURN(const auto windows, Windows(fill.arena(), fill.sequence()));
      if (Consumed()) {
        // Nobody needs it any more, but it is on its way, and its window is to be free again.
        absl::Status fetched = windows->Fetch(fill);
        windows->Release(fill);
        return fetched;
      }
      const std::int64_t generation = request_.id().generation();
      auto taken = TakeFill(
          *run_, request_.rank(), fill, *windows,
          [&](const SliceAddress& address, Dtype dtype, StagingPlace place) {
            return request_.initial()
                       ? run_->OpenInitial(address, generation, dtype)
                       : run_->OpenGradient(address, generation, request_.step(), dtype, place);
          });
      if (!taken.ok()) {
        rpc_.metrics->OnTransportError(windows->path(), TransportError::kProtocol);
        return taken.status();
      }
      const std::int64_t bytes = BytesOf(fill);
      rpc_.metrics->OnTransfer(windows->path(), TransportDirection::kReceived, bytes);
      reply_.mutable_push()->set_bytes(bytes);
      return request_.initial() ? CloseInitial(*taken) : CloseGradients(*taken);
    }

    absl::Status CloseGradients(const std::vector<OpenSlice>& slices) {
      v1::PushReply& push = *reply_.mutable_push();
      const auto arrivals = run_->CloseGradients(slices);
      for (std::size_t i = 0; i < arrivals.size(); ++i) {
        if (!arrivals[i].ok()) {
          for (std::size_t j = i; j < slices.size(); ++j) run_->Abandon(slices[j]);
          return arrivals[i].status();
        }
        const bool accepted = *arrivals[i] == SliceArrival::kAccepted;
        push.set_slices_accepted(push.slices_accepted() + accepted);
        push.set_slices_duplicate(push.slices_duplicate() + !accepted);
      }
      return absl::OkStatus();
    }

    absl::Status CloseInitial(const std::vector<OpenSlice>& slices) {
      {
        MutexLock lock(mutex_);
        writing_ = static_cast<int>(slices.size()) + 1;
      }
      for (const OpenSlice& slice : slices) {
        run_->CloseInitial(slice, [self = shared_from_this()](const auto& arrival) {
          self->OnWritten(arrival);
        });
      }
      OnWritten(absl::StatusOr<SliceArrival>(absl::AlreadyExistsError("")), /*last=*/true);
      return absl::OkStatus();
    }

    void OnWritten(const absl::StatusOr<SliceArrival>& arrival, bool last = false) {
      absl::Status failed;
      {
        MutexLock lock(mutex_);
        v1::InitializeReply& initial = *reply_.mutable_initialize();
        if (last) {
        } else if (!arrival.ok()) {
          if (failed_.ok()) failed_ = arrival.status();
        } else if (*arrival == SliceArrival::kAccepted) {
          initial.set_slices_accepted(initial.slices_accepted() + 1);
        } else {
          initial.set_slices_duplicate(initial.slices_duplicate() + 1);
        }
        if (--writing_ > 0) return;
        failed = failed_;
        const Run::InitialProgress progress = run_->initial_progress();
        initial.set_complete(progress.complete);
        for (const std::string& name : progress.missing) initial.add_missing(name);
      }
      failed.ok() ? Go() : Answer(failed);
    }

    // What comes behind the slices.
    void Go() {
      if (!request_.has_finish()) {
        return request_.has_pull() ? Pull(request_.pull().pull().version()) : Answer({});
      }
      if (request_.has_pull()) {
        // What can't be prepared is read when the step is over.
        auto prepared = Prepare(request_.step());
        if (prepared.ok()) {
          targets_ = TargetsOf(*prepared);
          if (targets_ != nullptr) {
            prepared_ = std::make_shared<PullTargets>(*std::move(prepared));
          }
        }
      }
      Ask();
    }

    void Ask() {
      const v1::FinishRequest& finish = request_.finish();
      const std::vector<std::string> absent(finish.absent().begin(), finish.absent().end());
      auto self = shared_from_this();
      waiter_ = run_->Finish(
          request_.rank(), request_.id().generation(), request_.step(), absent,
          [self](const absl::Status& status, const std::optional<StepOutcome>& outcome) {
            self->OnOutcome(status, outcome);
          },
          targets_);
      const absl::Duration wait =
          finish.wait_ms() > 0 ? std::min(absl::Milliseconds(finish.wait_ms()), rpc_.step_deadline)
                               : rpc_.step_deadline;
      MutexLock lock(mutex_);
      if (ended_) return;
      // An alarm keeps its callback for life: holding this there would keep call and run for ever.
      alarm_.Set(GrpcDeadlineIn(wait),
                 [weak = std::weak_ptr<Shared>(self)](bool fired) {
                   const auto waiting = fired ? weak.lock() : nullptr;
                   if (waiting != nullptr) waiting->run_->Deadline(waiting->waiter_);
                 });
    }

    void OnOutcome(const absl::Status& status, const std::optional<StepOutcome>& outcome) {
      if (!status.ok() || !outcome) return Answer(status);
      rpc_.faults->StopHere(FaultPoint::kStopBeforeFinishReply);
      if (rpc_.faults->Fire(FaultPoint::kDropFinishReply)) {
        return Answer(absl::UnavailableError("injected fault: the reply was lost"));
      }
      applied_ = outcome->applied;
      *reply_.mutable_finish()->mutable_outcome() = ToProto(*outcome);
      request_.has_pull() ? Pull(outcome->version) : Answer({});
    }

    absl::StatusOr<std::unique_ptr<ExchangeWindows>> Windows(const std::string& handle,
                                                             std::int64_t lease) const {
      return FindWindows(rpc_, peer_, handle, lease, run_->name(), request_.rank());
    }

    absl::StatusOr<PullTargets> Prepare(std::int64_t version) const {
      const v1::ExchangePull& pull = request_.pull();
      PullTargets result;
      MUOND_ASSIGN_OR_RETURN(result.windows, Windows(pull.arena(), pull.sequence()));
      MUOND_ASSIGN_OR_RETURN(const RankSlices boxes, SlicesFromProto(pull.pull().slices()));
      MUOND_ASSIGN_OR_RETURN(result.slices,
                             run_->CheckPull(request_.rank(), request_.id().generation(), version,
                                             boxes, pull.pull().master()));
      std::int64_t used = 0;  // of the region in hand
      int region = -1;
      for (std::size_t i = 0; i < result.slices.size(); ++i) {
        const PullSlice& slice = result.slices[i];
        const bool same = i > 0 && slice.name == result.slices[i - 1].name &&
                          slice.slice == result.slices[i - 1].slice;
        if (!same) ++region, used = 0;
        if (region >= pull.regions_size()) break;
        v1::ArenaRegion part = pull.regions(region);
        const std::int64_t bytes =
            slice.range.count * static_cast<std::int64_t>(DtypeBytes(slice.dtype));
        if (part.bytes() < 0 || bytes > part.bytes() - used) {
          return absl::InvalidArgumentError(
              absl::StrFormat("parameter \"%s\": pull: its region has %d bytes, it takes %d",
                              slice.name, part.bytes(), used + bytes));
        }
        // The whole region first, so that no part of it can reach beyond.
        MUOND_ASSIGN_OR_RETURN(std::byte* const at,
                               result.windows->Region(pull.window(), part, /*to_daemon=*/false));
        result.outs.push_back(at + used);
        used += bytes;
      }
      if (region + 1 == pull.regions_size()) return result;
      return absl::InvalidArgumentError(
          absl::StrFormat("run \"%s\": pull: %d regions for %d slices", run_->name(),
                          pull.regions_size(), region + 1));
    }

    // What the commit may write there itself: whole parameters, each state once.
    static std::shared_ptr<ParameterTargets> TargetsOf(const PullTargets& prepared) {
      // Pointers are lent for the length of a call, which may end before the step does.
      if (prepared.windows->path() == TransportPath::kPointer) return nullptr;
      auto targets = std::make_shared<ParameterTargets>();
      targets->keepalive = prepared.windows->keepalive();
      for (std::size_t i = 0; i < prepared.slices.size(); ++i) {
        const PullSlice& slice = prepared.slices[i];
        const bool whole = slice.range.count == slice.box.Elements() && slice.covers;
        if (!whole || targets->by_state.count(slice.parameter) > 0) return nullptr;
        targets->by_state[slice.parameter] = {prepared.outs[i], slice.dtype};
      }
      return targets;
    }

    void Pull(std::int64_t version) {
      // All parameters have changed, and the commit has written what they changed to.
      const bool written = targets_ != nullptr && targets_->written && applied_ &&
                           request_.finish().absent().empty();
      if (written) return OnPulled(absl::OkStatus(), *prepared_, version);
      auto prepared = Prepare(version);
      if (!prepared.ok()) return Answer(prepared.status());
      auto kept = std::make_shared<PullTargets>(*std::move(prepared));
      run_->ReadAll(kept->slices, kept->outs, version,
                    [self = shared_from_this(), kept, version](const absl::Status& status) {
                      self->OnPulled(status, *kept, version);
                    });
    }

    void OnPulled(absl::Status status, PullTargets& targets, std::int64_t version) {
      if (status.ok()) status = targets.windows->Deliver(request_.pull(), &reply_);
      if (status.ok()) {
        std::int64_t bytes = 0;
        for (const PullSlice& slice : targets.slices) {
          bytes += slice.range.count * static_cast<std::int64_t>(DtypeBytes(slice.dtype));
        }
        rpc_.metrics->OnTransfer(targets.windows->path(), TransportDirection::kSent, bytes);
        reply_.set_version(version);
      }
      Answer(status);
    }

    void Answer(const absl::Status& status) {
      {
        MutexLock lock(mutex_);
        if (std::exchange(ended_, true)) return;
      }
      alarm_.Cancel();
      absl::Status said = status;
      if (said.ok() && request_.has_fill() && !request_.has_finish() &&
          rpc_.faults->Fire(FaultPoint::kDropPushReply)) {
        said = absl::UnavailableError("injected fault: the reply was lost");
      }
      if (said.ok() && request_.has_pull() && !request_.has_finish() &&
          rpc_.faults->Fire(FaultPoint::kDropPullReply)) {
        said = absl::UnavailableError("injected fault: the reply was lost");
      }
      if (said.ok()) *reply_out_ = reply_;
      call_->Finish(muond::Answer(context_, said, run_.get()));
    }

    ExchangeCall* const call_;
    grpc::CallbackServerContext* const context_;
    const std::string peer_;
    const RpcContext& rpc_;
    const std::shared_ptr<Run> run_;
    const v1::ExchangeRequest request_;  // a copy: the call may end before its callbacks come
    v1::ExchangeReply* const reply_out_;
    v1::ExchangeReply reply_;
    std::shared_ptr<PullTargets> prepared_;  // before the step was finished
    std::shared_ptr<ParameterTargets> targets_;
    bool applied_ = false;
    std::atomic<std::uint64_t> waiter_{0};
    Mutex mutex_;
    int writing_ MUOND_GUARDED_BY(mutex_) = 0;
    absl::Status failed_ MUOND_GUARDED_BY(mutex_);
    bool ended_ MUOND_GUARDED_BY(mutex_) = false;
    grpc::Alarm alarm_;
  };

  void OnCancel() override { shared_->Gone(); }
  void OnDone() override { delete this; }
  void Hold(std::shared_ptr<Shared> shared) { shared_ = std::move(shared); }

 private:
  std::shared_ptr<Shared> shared_;
};

absl::Status CheckRequest(const std::string& run, const v1::ExchangeRequest& request) {
  if (request.finish().wait_ms() < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": wait_ms: expected 0 or more, got %d", run,
                        request.finish().wait_ms()));
  }
  if (!request.initial() || (!request.has_begin() && !request.has_finish())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("run \"%s\": exchange: initial values belong to no step", run));
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::Exchange(grpc::CallbackServerContext* context,
                                                     const v1::ExchangeRequest* request,
                                                     v1::ExchangeReply* reply) {
  const auto run = context_.runs->Find(request->id().run());
  if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
  if (absl::Status status = CheckRequest((*run)->name(), *request); !status.ok()) {
    return AnswerNow(context, status, run->get());
  }
  auto* const call = new ExchangeCall();
  auto shared =
      std::make_shared<ExchangeCall::Shared>(call, context, context_, *run, request, reply);
  call->Hold(shared);
  shared->Start();
  return call;
}

}  // namespace muond
