// What a session sends to one daemon and asks of it, part by part by the path that it can take.
#include <algorithm>
#include <utility>

#include "client/cpp/arena.h"
#include "client/cpp/bounce.h"
#include "client/cpp/daemons.h"
#include "client/cpp/exchange.h"
#include "client/cpp/pull_stream.h"
#include "client/cpp/push_stream.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "proto/check.h"

namespace muond::client {
namespace {

// The parts that `takes` are moved out of `parts`.
template <typename Part, typename Takes>
std::vector<Part> Split(std::vector<Part>& parts, const Takes& takes) {
  const auto rest = std::stable_partition(parts.begin(), parts.end(),
                                          [&](const Part& part) { return !takes(part); });
  std::vector<Part> taken(std::make_move_iterator(rest), std::make_move_iterator(parts.end()));
  parts.erase(rest, parts.end());
  return taken;
}

std::shared_ptr<Bounce> BounceOf(Connection::Path& path) {
  if (path.bounce == nullptr) path.bounce = std::make_shared<Bounce>();
  return path.bounce;
}

}  // namespace

CallResult Session::SendParts(int daemon, const std::string& action, std::vector<SlicePart> parts,
                              bool initial, bool* complete) {
  auto path = ExchangeWith(daemon);
  if (!path.ok()) return {path.status(), std::nullopt};
  std::vector<SlicePart> direct;
  if (path->has_value()) {
    direct = Split(parts, [&](const SlicePart& part) {
      return (*path)->Takes(part.source->place) && FillFits(**path, part, initial);
    });
  }
  if (!direct.empty()) {
    CallResult result = FillDirect(daemon, action, direct, initial, complete);
    // The path is gone in the middle: what the daemon has already counts once.
    const bool gone = !result.status.ok() && (*daemons_)[daemon].path().name == "grpc";
    if (!result.status.ok() && !gone) return result;
    if (gone) parts.insert(parts.end(), direct.begin(), direct.end());
    if (parts.empty()) return result;
  }
  // Who has nothing to send of initial values says so.
  if (parts.empty() && !initial) return {};
  return StreamParts(daemon, action, parts, initial, complete);
}

CallResult Session::StreamParts(int daemon, const std::string& action,
                                const std::vector<SlicePart>& parts, bool initial,
                                bool* complete) {
  Connection& connection = (*daemons_)[daemon];
  std::vector<SliceSource> hosts;
  std::vector<SlicePart> streamed = parts;
  const auto on_gpu = [](const SlicePart& part) { return part.source->place.on_gpu(); };
  if (std::any_of(parts.begin(), parts.end(), on_gpu)) {
    auto driver = Driver();
    if (!driver.ok()) return {driver.status(), std::nullopt};
    for (const SlicePart& part : parts) hosts.push_back(*part.source);
    auto copied = BounceOf(connection.path())->ToHost(*driver, hosts);
    if (!copied.ok()) return {copied.status(), std::nullopt};
    hosts = *std::move(copied);
    for (std::size_t i = 0; i < hosts.size(); ++i) streamed[i].source = &hosts[i];
  }
  RetryPlan plan = Plan(daemon, action, options_.bulk_timeout);
  plan.kind = CallKind::kStream;
  return CallWithRetries(plan, [&](const Attempt& attempt) -> CallResult {
    auto arena = ArenaOf(daemon);
    if (!arena.ok()) return {arena.status(), std::nullopt};
    const PushJob job{connection.bulk(), Id(),         rank_,
                      streamed,          ChunkBytes(), *std::move(arena)};
    if (!initial) {
      v1::PushReply reply;
      return SendPush(job, step_, attempt.deadline, &reply);
    }
    v1::InitializeReply reply;
    CallResult result = SendInitialize(job, attempt.deadline, &reply);
    *complete = reply.complete();
    return result;
  });
}

CallResult Session::PullParts(int daemon, const std::string& action, std::int64_t version,
                              std::vector<SinkPart> parts, bool master) {
  auto path = ExchangeWith(daemon);
  if (!path.ok()) return {path.status(), std::nullopt};
  std::vector<SinkPart> direct;
  if (path->has_value()) {
    direct = Split(parts, [&](const SinkPart& part) { return PullFits(**path, part); });
  }
  if (!direct.empty()) {
    CallResult result = PullDirect(daemon, action, version, direct, master);
    const bool gone = !result.status.ok() && (*daemons_)[daemon].path().name == "grpc";
    if (!result.status.ok() && !gone) return result;
    if (gone) parts.insert(parts.end(), direct.begin(), direct.end());
  }
  return parts.empty() ? CallResult{} : StreamPull(daemon, action, version, parts, master);
}

CallResult Session::StreamPull(int daemon, const std::string& action, std::int64_t version,
                               const std::vector<SinkPart>& parts, bool master) {
  Connection& connection = (*daemons_)[daemon];
  std::vector<SliceSink> sinks, hosts;
  std::vector<SinkPart> streamed = parts;
  for (const SinkPart& part : parts) sinks.push_back(*part.sink);
  const bool bounced = std::any_of(sinks.begin(), sinks.end(),
                                   [](const SliceSink& sink) { return sink.place.on_gpu(); });
  if (bounced) {
    auto driver = Driver();
    if (!driver.ok()) return {driver.status(), std::nullopt};
    auto made = BounceOf(connection.path())->HostSinks(*driver, sinks);
    if (!made.ok()) return {made.status(), std::nullopt};
    hosts = *std::move(made);
    for (std::size_t i = 0; i < hosts.size(); ++i) streamed[i].sink = &hosts[i];
  }
  RetryPlan plan = Plan(daemon, action, options_.bulk_timeout);
  plan.kind = CallKind::kStream;
  CallResult result = CallWithRetries(plan, [&](const Attempt& attempt) -> CallResult {
    auto arena = ArenaOf(daemon);
    if (!arena.ok()) return {arena.status(), std::nullopt};
    const PullJob job{connection.bulk(), Id(),   rank_,        version,
                      streamed,          master, ChunkBytes(), *std::move(arena)};
    return ReceivePull(job, attempt.deadline);
  });
  if (bounced && result.status.ok()) {
    result.status = BounceOf(connection.path())->FromHost(sinks, hosts);
  }
  return result;
}

}  // namespace muond::client
