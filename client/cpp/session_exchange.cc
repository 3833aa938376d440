// A session's slices in memory that the daemon reaches itself: a GPU's arena, or pointers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/exchange.h"
#include "client/cpp/owner_table.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "client/cpp/slice_table.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/pointer_lease.h"
#include "proto/steady_time.h"

namespace muond::client {

absl::Status Session::SetUpGpu() {
  if (options_.gpu < 0) return absl::OkStatus();
  MUOND_ASSIGN_OR_RETURN(const std::shared_ptr<GpuDriver> driver, Driver());
  MUOND_ASSIGN_OR_RETURN(gpu_uuid_, driver->Uuid(options_.gpu));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<GpuDriver>> Session::Driver() const {
  return options_.gpu_driver != nullptr ? options_.gpu_driver : LoadGpuDriver();
}

void Session::OfferPaths(v1::RegisterRequest* request) {
  request->add_transports("arena");
  request->add_transports("pointer");
  request->set_boot_id(BootId());
  request->set_pid_namespace(PidNamespace());
  request->set_pid(getpid());
  if (options_.gpu < 0) return;
  request->set_gpu(gpu_uuid_);
  request->add_transports("cuda-ipc");
  if (options_.transport != "auto" && options_.transport != "nccl") return;
  if (const auto worker = NcclWorker(); worker.ok()) {
    request->add_transports("nccl");
    int version = 0;
    (*worker)->api().get_version(&version);
    request->set_nccl_version(version);
  }
}

// ---- The arena ----------------------------------------------------------------------------------

GpuLayout Session::LayoutFor(int daemon) const {
  GpuLayout layout;
  for (const ParameterSpec& parameter : spec_.parameters) {
    const auto held = slices_.find(parameter.name);
    if (held == slices_.end()) continue;
    const Dtype gradient = options_.gpu_gradient_dtype.value_or(parameter.dtype);
    for (std::size_t i = 0; i < held->second.size(); ++i) {
      std::int64_t elements = 0;
      for (const ElementRange& range : owners_->Owned(daemon, parameter.name, held->second[i])) {
        elements += range.count;
      }
      if (elements == 0) continue;
      layout.Add(parameter.name, static_cast<std::int64_t>(i),
                 elements * static_cast<std::int64_t>(DtypeBytes(gradient)),
                 elements * static_cast<std::int64_t>(DtypeBytes(parameter.dtype)));
    }
  }
  return layout;
}

// Once it is known who owns what. A daemon that can't give the memory is gone on with over gRPC.
absl::Status Session::AttachGpus() {
  for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
    Connection::Path& path = (*daemons_)[daemon].path();
    if (path.name == "nccl" && (path.pair == nullptr || path.pair->lost())) {
      MUOND_RETURN_IF_ERROR(AttachPair(daemon));
    }
    if (path.name != "cuda-ipc") continue;
    const bool usable = path.gpu != nullptr && !path.gpu->lost();
    if (usable && path.gpu->layout() == LayoutFor(daemon)) continue;
    MUOND_RETURN_IF_ERROR(AttachGpu(daemon));
  }
  return absl::OkStatus();
}

absl::Status Session::AttachGpu(int daemon) {
  Connection& connection = (*daemons_)[daemon];
  Connection::Path& path = connection.path();
  // Whoever still has views of it may read them; what was only replaced is the daemon's again.
  if (path.gpu != nullptr && path.gpu->lost()) path.retired.push_back(std::move(path.gpu));
  path.gpu = nullptr;
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<GpuDriver> driver, Driver());
  const GpuArenaRequest request{.id = Id(),
                                .rank = rank_,
                                .windows = options_.gpu_windows,
                                .device = options_.gpu,
                                .gpu = gpu_uuid_,
                                .socket = connection.arena_socket()};
  std::string handle;
  const absl::Time deadline = SteadyNow() + options_.call_timeout;
  auto link = GpuLink::Attach(connection.control(), request, LayoutFor(daemon), driver, deadline,
                              &handle);
  if (link.ok()) {
    path.gpu = *std::move(link);
    const std::string why = driver->WhyOneByOne(options_.gpu);
    if (!why.empty() && path.reason.find(why) == std::string::npos) {
      path.reason += "; slices are copied one by one: " + why;
    }
    return absl::OkStatus();
  }
  if (CallScope::CurrentIsOver()) return link.status();  // says nothing about the path
  v1::CloseArenaRequest close;
  *close.mutable_id() = Id();
  close.set_rank(rank_);
  close.set_handle(handle);
  close.set_gpu(true);
  close.set_fallback(std::string(link.status().message()));
  v1::CloseArenaReply closed;
  // As in AttachArena.
  CallOnce(connection.control(), &v1::Optimizer::Stub::CloseArena, close, &closed, deadline)
      .status.IgnoreError();
  if (options_.transport == "cuda-ipc") {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": transport \"cuda-ipc\": %s", spec_.name, link.status().message()));
  }
  path.name = "grpc";
  path.reason = std::string(link.status().message());
  return absl::OkStatus();
}

absl::StatusOr<std::optional<ExchangePath>> Session::ExchangeWith(int daemon) {
  Connection::Path& path = (*daemons_)[daemon].path();
  std::optional<ExchangePath> result;
  if (path.name == "pointer") result = ExchangePath{.device = options_.gpu};
  if (path.name == "cuda-ipc") {
    if (path.gpu == nullptr || path.gpu->lost()) MUOND_RETURN_IF_ERROR(AttachGpu(daemon));
    if (path.gpu != nullptr) result = ExchangePath{.link = path.gpu, .device = options_.gpu};
  }
  if (path.name == "nccl") {
    if (path.pair == nullptr || path.pair->lost()) MUOND_RETURN_IF_ERROR(AttachPair(daemon));
    if (path.pair != nullptr) {
      result = ExchangePath{.pair = path.pair, .layout = LayoutFor(daemon), .device = options_.gpu};
    }
  }
  if (result.has_value() && options_.gpu >= 0) {
    MUOND_ASSIGN_OR_RETURN(result->driver, Driver());
  }
  return result;
}

absl::StatusOr<GpuLink*> Session::LinkOf(const std::string& parameter, std::int64_t slice) {
  MUOND_RETURN_IF_ERROR(table_->CheckHeld(parameter, slice));
  const Box& box = table_->BoxOf(parameter, slice);
  for (int daemon = 0; daemon < daemons_->count(); ++daemon) {
    const std::vector<ElementRange> ranges = owners_->Owned(daemon, parameter, box);
    if (ranges.empty()) continue;
    const Connection::Path& path = (*daemons_)[daemon].path();
    if (path.gpu != nullptr && ranges.size() == 1 && ranges[0].count == box.Elements()) {
      return path.gpu.get();
    }
    break;
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "parameter \"%s\": slice %d: no memory of a GPU is shared with one daemon that owns it",
      parameter, slice));
}

absl::StatusOr<void*> Session::GradientPlace(const std::string& parameter, std::int64_t slice,
                                             std::int64_t window) {
  MUOND_ASSIGN_OR_RETURN(GpuLink* const link, LinkOf(parameter, slice));
  if (window < 0 || window >= std::ssize(link->outgoing())) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": slice %d: there is no window %d", parameter, slice, window));
  }
  return link->At(link->outgoing()[static_cast<std::size_t>(window)],
                  link->layout().Find(parameter, slice)->gradient);
}

absl::StatusOr<void*> Session::ParameterPlace(const std::string& parameter, std::int64_t slice) {
  MUOND_ASSIGN_OR_RETURN(GpuLink* const link, LinkOf(parameter, slice));
  return link->At(link->incoming(), link->layout().Find(parameter, slice)->parameter);
}

// ---- Calls --------------------------------------------------------------------------------------

CallResult Session::CallExchange(int daemon, const std::string& action, absl::Duration timeout,
                                 const std::function<absl::Status(v1::ExchangeRequest&)>& put,
                                 v1::ExchangeReply* reply) {
  RetryPlan plan = Plan(daemon, action, timeout);
  std::shared_ptr<GpuLink> put_into;
  v1::ExchangeRequest request;
  bool made = false;
  return CallWithRetries(plan, [&](const Attempt& attempt) -> CallResult {
    auto path = ExchangeWith(daemon);
    if (!path.ok()) return {path.status(), std::nullopt};
    const std::shared_ptr<GpuLink> link = path->has_value() ? (*path)->link : nullptr;
    const bool pair = path->has_value() && (*path)->pair != nullptr;
    // What was put into an arena that is lost must be put into the new one, and what goes through a
    // pair goes once.
    if (!made || pair || link != put_into) {
      request.Clear();
      *request.mutable_id() = Id();
      request.set_rank(rank_);
      request.set_step(step_);
      if (absl::Status status = put(request); !status.ok()) return {status, std::nullopt};
      put_into = link;
      made = true;
    }
    if (request.has_finish()) request.mutable_finish()->set_wait_ms(WaitMs(attempt.deadline));
    // Of pointers; it ends with the attempt, when the daemon has let go of them.
    const PointerLease lease;
    if (link == nullptr && !pair) {
      if (request.has_fill()) request.mutable_fill()->set_sequence(lease.number());
      if (request.has_pull()) request.mutable_pull()->set_sequence(lease.number());
    }
    CallResult result = CallOnce((*daemons_)[daemon].control(), &v1::Optimizer::Stub::Exchange,
                                 request, reply, attempt);
    if (pair && request.has_fill()) {
      const absl::Status settled = SettlePair(**path, result.status);
      if (result.status.ok()) result.status = settled;
    }
    // Nobody knows whether the daemon is sending parameters that are not received here.
    const bool untold = absl::IsUnavailable(result.status) ||
                        absl::IsDeadlineExceeded(result.status) ||
                        absl::IsCancelled(result.status);
    if (pair && request.has_pull() && untold) (*path)->pair->Abandon(result.status);
    return result;
  });
}

// The path is gone: the caller starts over, by another one.
absl::Status Session::PathLost(int daemon) const {
  return absl::UnavailableError(absl::StrFormat(
      "run \"%s\": daemon \"%s\": the shared memory is lost: %s", spec_.name,
      (*daemons_)[daemon].peer(), (*daemons_)[daemon].path().reason));
}

CallResult Session::FillDirect(int daemon, const std::string& action,
                               std::span<const SlicePart> parts, bool initial,
                               bool* complete) {
  if ((*daemons_)[daemon].path().pair != nullptr) {
    std::size_t done = 0;
    if (FillPair(daemon, parts, initial, complete, &done).status.ok()) return {};
    parts = parts.subspan(done);  // what is left, with all patience; the same error again, if any
  }
  while (!parts.empty()) {
    std::size_t taken = 0;
    v1::ExchangeReply reply;
    CallResult result = CallExchange(
        daemon, action, options_.bulk_timeout,
        [&](v1::ExchangeRequest& request) -> absl::Status {
          MUOND_ASSIGN_OR_RETURN(const auto path, ExchangeWith(daemon));
          if (!path.has_value()) return PathLost(daemon);
          request.set_initial(initial);
          MUOND_ASSIGN_OR_RETURN(
              taken, PutFill(*path, parts, NcclDeadline(), request.mutable_fill()));
          return absl::OkStatus();
        },
        &reply);
    if (!result.status.ok()) return result;
    const std::int64_t told =
        initial ? reply.initialize().slices_accepted() + reply.initialize().slices_duplicate()
                : reply.push().slices_accepted() + reply.push().slices_duplicate();
    if (told != static_cast<std::int64_t>(taken)) {
      return {absl::DataLossError(
                  absl::StrFormat("run \"%s\": %s: the daemon took %d of %d slices", spec_.name,
                                  action, told, taken)),
              std::nullopt};
    }
    if (complete != nullptr) *complete = reply.initialize().complete();
    parts = parts.subspan(taken);
  }
  return {};
}

std::vector<SinkPart> Session::SinksFor(int daemon, std::span<const SliceSink> sinks) const {
  std::vector<SinkPart> parts;
  for (const SliceSink& sink : sinks) {
    const Box& box = table_->BoxOf(sink.parameter, sink.slice);
    std::vector<ElementRange> ranges = owners_->Owned(daemon, sink.parameter, box);
    if (!ranges.empty()) parts.push_back({&sink, &box, std::move(ranges)});
  }
  return parts;
}

// ---- A whole step -------------------------------------------------------------------------------

// Nothing where it can't be one call: several daemons, slices by several paths.
std::optional<CallResult> Session::StepDirect(const StepRequest& step, bool* pulled,
                                              std::vector<v1::FinishReply>* replies) {
  auto path = ExchangeWith(0);
  if (daemons_->count() != 1 || !path.ok() || !path->has_value()) return std::nullopt;
  const std::vector<SlicePart> parts = PartsFor(0, step.gradients);
  const std::vector<SinkPart> sinks = SinksFor(0, step.sinks);
  const auto direct = [&](const SlicePart& part) {
    return (*path)->Takes(part.source->place) && part.source->micro_batch == 0 &&
           (!(*path)->pointers() || part.ranges.size() == 1);
  };
  if (!std::all_of(parts.begin(), parts.end(), direct) ||
      !std::all_of(sinks.begin(), sinks.end(),
                   [&](const SinkPart& sink) { return PullFits(**path, sink); })) {
    return std::nullopt;
  }
  // Found out before anything is sent: what a pair has sent must be announced, too.
  const bool many = (*path)->pair != nullptr && (*path)->pair->CountThatFit(parts) < parts.size();
  if (many) return std::nullopt;
  if (step.begin != nullptr) step_ = step.begin->step;
  v1::ExchangeReply reply;
  v1::ExchangePull asked;
  std::optional<ExchangePath> used;
  bool fits = true;
  CallResult result = CallExchange(
      0, absl::StrFormat("step %d", step_), options_.step_timeout,
      [&](v1::ExchangeRequest& request) -> absl::Status {
        MUOND_ASSIGN_OR_RETURN(used, ExchangeWith(0));
        if (!used.has_value()) return PathLost(0);
        if (step.begin != nullptr) ToProto(*step.begin, request.mutable_begin());
        if (!parts.empty()) {
          MUOND_ASSIGN_OR_RETURN(const std::size_t taken,
                                 PutFill(*used, parts, NcclDeadline(), request.mutable_fill()));
          fits = taken == parts.size();
          if (!fits) return absl::FailedPreconditionError("more than one window");
        }
        for (const std::string& name : *step.absent) request.mutable_finish()->add_absent(name);
        request.mutable_finish();
        if (!sinks.empty()) {
          std::int64_t taken = 0;
          MUOND_RETURN_IF_ERROR(PutPull(*used, sinks, false, &taken, request.mutable_pull()));
        }
        asked = request.pull();
        return absl::OkStatus();
      },
      &reply);
  if (!fits) return std::nullopt;
  if (!result.status.ok()) return result;
  if (step.begin != nullptr) micro_batches_ = std::max<std::int64_t>(step.begin->micro_batches, 1);
  replies->assign(1, reply.finish());
  *pulled = !sinks.empty();
  if (*pulled) result.status = TakePull(*used, sinks, asked, reply, NcclDeadline());
  return result;
}

}  // namespace muond::client
