// A session's NCCL pairs: where NCCL comes from, how a pair is made, and what becomes of one; and
// pulls, whose pieces a pair has under way side by side.
#include <algorithm>
#include <deque>
#include <future>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/daemons.h"
#include "client/cpp/exchange.h"
#include "client/cpp/pair.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "nccl/cuda/cuda_device.h"
#include "nccl/library.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

constexpr std::int64_t kWindowUnit = 256;
// Some are on their way while one is summed here and one is taken there.
constexpr std::int64_t kWindows = 4;
// Of a pull, to a piece: much beside what a call costs, little beside all parameters. Nothing moves
// before the first piece has been written and summed, nor while the last one is looked at.
constexpr std::int64_t kPieceWindows = 2;

}  // namespace

absl::StatusOr<std::shared_ptr<nccl::Worker>> Session::NcclWorker() {
  if (nccl_worker_ != nullptr) return nccl_worker_;
  if (options_.nccl_worker != nullptr) {
    nccl_worker_ = options_.nccl_worker;
    return nccl_worker_;
  }
  MUOND_ASSIGN_OR_RETURN(const nccl::Library* const library, nccl::Load());
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<nccl::Device> device, nccl::OpenCudaDevice(gpu_uuid_));
  nccl_worker_ = std::make_shared<nccl::Worker>(library->api, std::move(device));
  return nccl_worker_;
}

absl::Status Session::AttachPair(int daemon) {
  Connection& connection = (*daemons_)[daemon];
  Connection::Path& path = connection.path();
  path.pair = nullptr;
  MUOND_ASSIGN_OR_RETURN(std::shared_ptr<nccl::Worker> worker, NcclWorker());
  const GpuLayout layout = LayoutFor(daemon);
  std::int64_t window = std::min(options_.nccl_window_bytes, layout.window_bytes());
  window = std::max(window, layout.largest_gradient_bytes());
  window = (window + kWindowUnit - 1) / kWindowUnit * kWindowUnit;
  PairRequest request{.id = Id(),
                      .rank = rank_,
                      .window_bytes = window,
                      .windows = kWindows,
                      .pull_bytes = layout.pull_bytes()};
  worker->api().get_version(&request.nccl_version);
  const absl::Time deadline = NcclDeadline();
  auto pair = PairLink::Open(connection.control(), request, std::move(worker), deadline);
  if (pair.ok()) {
    path.pair = *std::move(pair);
    return absl::OkStatus();
  }
  if (CallScope::CurrentIsOver()) return pair.status();  // says nothing about the path
  v1::ClosePairRequest close;
  *close.mutable_id() = Id();
  close.set_rank(rank_);
  close.set_fallback(std::string(pair.status().message()));
  v1::ClosePairReply closed;
  // The daemon counts it; the pair itself ends with the call that made it.
  CallOnce(connection.control(), &v1::Optimizer::Stub::ClosePair, close, &closed, NcclDeadline())
      .status.IgnoreError();
  if (options_.transport == "nccl") {
    return absl::Status(absl::IsInvalidArgument(pair.status())
                            ? absl::StatusCode::kInvalidArgument
                            : absl::StatusCode::kFailedPrecondition,
                        absl::StrFormat("run \"%s\": transport \"nccl\": %s", spec_.name,
                                        pair.status().message()));
  }
  path.name = "grpc";
  path.reason = std::string(pair.status().message());
  return absl::OkStatus();
}

CallResult Session::FillPair(int daemon, std::span<const SlicePart> parts, bool initial,
                             bool* complete, std::size_t* done) {
  struct Flight {
    v1::ExchangeRequest request;
    v1::ExchangeReply reply;
    std::size_t taken = 0;
    std::future<CallResult> answer;
  };
  auto path = ExchangeWith(daemon);
  if (!path.ok()) return {path.status(), std::nullopt};
  if (!path->has_value() || (*path)->pair == nullptr) return {PathLost(daemon), std::nullopt};
  PairLink& pair = *(*path)->pair;
  const absl::Time deadline = SteadyNow() + options_.bulk_timeout;
  std::deque<std::unique_ptr<Flight>> flights;
  CallResult result;
  while (!flights.empty() || (result.status.ok() && !parts.empty())) {
    if (result.status.ok() && !parts.empty() && std::ssize(flights) < pair.windows()) {
      auto flight = std::make_unique<Flight>();
      *flight->request.mutable_id() = Id();
      flight->request.set_rank(rank_);
      flight->request.set_step(step_);
      flight->request.set_initial(initial);
      const auto taken = PutFill(**path, parts, NcclDeadline(), flight->request.mutable_fill());
      if (!taken.ok()) {
        result.status = taken.status();
        continue;
      }
      flight->taken = *taken;
      parts = parts.subspan(*taken);
      flight->answer = std::async(
          std::launch::async, [this, daemon, deadline, scope = CallScope::Current(),
                               call = flight.get()] {
            const CallScope::Guard guard(scope);
            return CallOnce((*daemons_)[daemon].control(), &v1::Optimizer::Stub::Exchange,
                            call->request, &call->reply, deadline);
          });
      flights.push_back(std::move(flight));
      continue;
    }
    Flight& oldest = *flights.front();
    CallResult answer = oldest.answer.get();
    const v1::ExchangeReply& reply = oldest.reply;
    const std::int64_t told =
        initial ? reply.initialize().slices_accepted() + reply.initialize().slices_duplicate()
                : reply.push().slices_accepted() + reply.push().slices_duplicate();
    if (answer.status.ok() && told != static_cast<std::int64_t>(oldest.taken)) {
      answer.status = absl::DataLossError("the daemon took fewer slices than were sent");
    }
    if (answer.status.ok() && result.status.ok()) {
      *done += oldest.taken;
      // Of fills that are written side by side any may be the last.
      if (complete != nullptr) *complete = *complete || reply.initialize().complete();
    } else if (result.status.ok()) {
      result = std::move(answer);
    }
    flights.pop_front();
  }
  const absl::Status settled = SettlePair(**path, result.status);
  if (result.status.ok()) result.status = settled;
  return result;
}

CallResult Session::PullDirect(int daemon, const std::string& action, std::int64_t version,
                               std::span<const SinkPart> sinks, bool master) {
  // Through a pair: what the daemon has answered to send comes while the next pieces are asked for.
  // A call that nobody answers takes its pair with it, and what was still to come through that: the
  // pull fails then, and its Recovery pulls again.
  struct Pending {
    std::shared_ptr<PairLink> pair;
    PairLink::Arrival arrival;
  };
  std::deque<Pending> pending;
  const auto settle = [&pending](CallResult& result) {
    const absl::Status settled = pending.front().pair->Settle(pending.front().arrival);
    if (result.status.ok()) result.status = settled;
    pending.pop_front();
  };
  const absl::Time deadline = SteadyNow() + options_.bulk_timeout;
  std::int64_t used = 0;
  CallResult result;
  while (result.status.ok() && !sinks.empty()) {
    const std::span<const SinkPart> piece = PullPiece(daemon, sinks);
    v1::ExchangeReply reply;
    v1::ExchangePull asked;
    std::optional<ExchangePath> path;
    const std::int64_t start = used;
    result = CallExchange(
        daemon, action, deadline - SteadyNow(),
        [&](v1::ExchangeRequest& request) -> absl::Status {
          MUOND_ASSIGN_OR_RETURN(path, ExchangeWith(daemon));
          if (!path.has_value()) return PathLost(daemon);
          used = start;
          MUOND_RETURN_IF_ERROR(PutPull(*path, piece, master, &used, request.mutable_pull()));
          request.mutable_pull()->mutable_pull()->set_version(version);
          asked = request.pull();
          return absl::OkStatus();
        },
        &reply);
    if (result.status.ok() && path->pair != nullptr) {
      auto arrival = BeginPull(*path, piece, asked, reply, NcclDeadline());
      result.status = arrival.status();
      if (arrival.ok()) {
        pending.push_back({path->pair, *std::move(arrival)});
      } else {
        path->pair->Abandon(result.status);  // the daemon sends what nobody receives
      }
    } else if (result.status.ok()) {
      result.status = TakePull(*path, piece, asked, reply, NcclDeadline());
    }
    sinks = sinks.subspan(piece.size());
    if (pending.size() == PairLink::kArrivals) settle(result);
  }
  while (!pending.empty()) settle(result);
  return result;
}

std::span<const SinkPart> Session::PullPiece(int daemon, std::span<const SinkPart> sinks) const {
  if ((*daemons_)[daemon].path().pair == nullptr) return sinks;
  std::int64_t bytes = 0;
  std::size_t count = 0;
  while (count < sinks.size() && bytes < kPieceWindows * options_.nccl_window_bytes) {
    const SinkPart& part = sinks[count++];
    for (const ElementRange& range : part.ranges) {
      bytes += range.count * static_cast<std::int64_t>(DtypeBytes(part.sink->dtype));
    }
  }
  return sinks.first(count);
}

absl::Status Session::SettlePair(const ExchangePath& path, const absl::Status& answer) {
  // After an answer that is no error the daemon has it all. After another it may not have asked
  // NCCL for any of it: what has not gone by now is waited for by nobody.
  if (answer.ok()) return path.pair->AwaitSent(absl::InfiniteFuture());
  absl::Status sent = path.pair->AwaitSent(SteadyNow() + absl::Milliseconds(50));
  if (!sent.ok()) path.pair->Abandon(sent);
  return sent;
}

}  // namespace muond::client
