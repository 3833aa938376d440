#include "server/cluster/raise_generation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/steady_time.h"
#include "server/cluster/vote_message.h"

namespace muond {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kPause = absl::Milliseconds(100);

// Does `ask` for every daemon at once, each again until it answers or the deadline has passed.
// Returns by daemon the last status.
std::vector<absl::Status> AskAll(int daemons, absl::Time deadline,
                                 const std::function<absl::Status(int)>& ask) {
  std::vector<absl::Status> results(daemons);
  AtOnce(daemons, [&](int daemon) {
    for (;;) {
      results[daemon] = ask(daemon);
      const bool again =
          absl::IsUnavailable(results[daemon]) || absl::IsDeadlineExceeded(results[daemon]);
      if (!again || SteadyNow() + kPause >= deadline) return;
      absl::SleepFor(kPause);
    }
  });
  return results;
}

void SetDeadline(grpc::ClientContext& context, absl::Time deadline) {
  context.set_deadline(GrpcDeadline(std::min(SteadyNow() + kCallTimeout, deadline)));
}

// `promised`: what a daemon that refuses has promised, so that the next try goes above it at once.
absl::StatusOr<DaemonPromise> AskPromise(Peers& peers, int daemon,
                                         const v1::PrepareRequest& request, absl::Time deadline,
                                         std::int64_t& promised) {
  grpc::ClientContext context;
  SetDeadline(context, deadline);
  v1::PrepareReply reply;
  const absl::Status status = FromGrpc(peers.stub(daemon).Prepare(&context, request, &reply));
  if (const auto position = PositionFrom(context); !status.ok() && position) {
    promised = std::max(position->generation(), position->promised());
  }
  MUOND_RETURN_IF_ERROR(status);
  DaemonPromise promise{{reply.next_step(), {}, reply.lineage()},
                        reply.additions(), reply.adopted()};
  MUOND_ASSIGN_OR_RETURN(promise.steps.votes, VotesFromProto(reply.votes()));
  return promise;
}

absl::Status AskRaise(Peers& peers, int daemon, const v1::RaiseRequest& request,
                      absl::Time deadline) {
  grpc::ClientContext context;
  SetDeadline(context, deadline);
  v1::RaiseReply reply;
  return FromGrpc(peers.stub(daemon).Raise(&context, request, &reply));
}

// OK, or one status that names every daemon that failed, with the first one's code.
absl::Status Summary(const Peers& peers, const std::string& run, const char* what,
                     const std::vector<absl::Status>& results) {
  std::vector<std::string> failed;
  absl::StatusCode code = absl::StatusCode::kOk;
  for (std::size_t daemon = 0; daemon < results.size(); ++daemon) {
    if (results[daemon].ok()) continue;
    if (code == absl::StatusCode::kOk) code = results[daemon].code();
    failed.push_back(absl::StrFormat("daemon \"%s\": %s", peers.daemons()[daemon],
                                     results[daemon].message()));
  }
  if (failed.empty()) return absl::OkStatus();
  if (code == absl::StatusCode::kDeadlineExceeded) code = absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrFormat("run \"%s\": %s: %s", run, what,
                                            absl::StrJoin(failed, "; ")));
}

// What to order, now that all have promised.
absl::StatusOr<RaiseOrder> OrderFrom(const Peers& peers, const std::string& run,
                                     std::int64_t generation, const RaiseWish& wish,
                                     const std::vector<DaemonPromise>& promised) {
  RaiseOrder order{.generation = generation, .reinitialize = wish.reinitialize};
  std::vector<StepMachine::Promise> promises;
  for (const DaemonPromise& promise : promised) promises.push_back(promise.steps);
  if (!wish.reinitialize) {
    if (const absl::Status one = CheckOneLineage(peers.daemons(), promises); !one.ok()) {
      return absl::Status(one.code(), absl::StrFormat("run \"%s\": raise the generation: %s", run,
                                                      one.message()));
    }
    order.settled = SettledVotes(peers.count(), promises);
  }
  for (const auto& promise : promises) {
    order.resume_step = std::max(order.resume_step, promise.next_step);
  }
  if (!wish.restore.name.empty()) {
    order.restore = wish.restore.name;
    order.resume_step = wish.restore.step;
  }
  const auto [least, most] = std::minmax_element(
      promised.begin(), promised.end(),
      [](const DaemonPromise& a, const DaemonPromise& b) { return a.additions < b.additions; });
  order.adopt = least->additions < most->additions ? most->adopted : wish.adopt;
  return order;
}

// `highest`: raised to the highest promise that a daemon told of.
absl::Status TryOnce(Peers& peers, const v1::PeerRun& introduction, std::int64_t generation,
                     const RaiseWish& wish, const RaiseHooks& own, absl::Time deadline,
                     std::int64_t& highest) {
  v1::PrepareRequest prepare;
  *prepare.mutable_peer() = introduction;
  prepare.set_generation(generation);
  prepare.set_reinitialize(wish.reinitialize);
  if (wish.unless_made_anew) prepare.set_seen(wish.current);
  prepare.set_adopt(wish.adopt);
  std::vector<DaemonPromise> promises(peers.count());
  std::vector<std::int64_t> told(peers.count(), 0);
  const auto promised = AskAll(peers.count(), deadline, [&](int daemon) {
    auto promise = daemon == peers.self()
                       ? own.prepare(generation)
                       : AskPromise(peers, daemon, prepare, deadline, told[daemon]);
    if (promise.ok()) promises[daemon] = *std::move(promise);
    return promise.status();
  });
  highest = std::max(highest, *std::max_element(told.begin(), told.end()));
  MUOND_RETURN_IF_ERROR(Summary(peers, introduction.run(), "raise the generation", promised));

  MUOND_ASSIGN_OR_RETURN(const RaiseOrder order,
                         OrderFrom(peers, introduction.run(), generation, wish, promises));
  v1::RaiseRequest raise;
  *raise.mutable_peer() = introduction;
  raise.set_restore(order.restore);
  raise.set_generation(generation);
  VotesToProto(order.settled, raise.mutable_settled());
  raise.set_reinitialize(order.reinitialize);
  raise.set_resume_step(order.resume_step);
  raise.set_adopt(order.adopt);
  const auto raised = AskAll(peers.count(), deadline, [&](int daemon) {
    return daemon == peers.self() ? own.raise(order) : AskRaise(peers, daemon, raise, deadline);
  });
  return Summary(peers, introduction.run(), "raise the generation", raised);
}

}  // namespace

absl::Status RaiseGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                             const RaiseWish& wish, const RaiseHooks& own, absl::Time deadline) {
  const v1::PeerRun introduction = peers.Introduction(run, plan_hash);
  // Each daemon has numbers of its own: two that coordinate at a time never give one to two orders.
  const auto own_above = [&](std::int64_t generation) {
    do ++generation;
    while (generation % peers.count() != peers.self());
    return generation;
  };
  absl::Status status;
  // A daemon that is ahead, by another's unfinished try, refuses: go above it.
  std::int64_t highest = wish.current;
  while (SteadyNow() < deadline) {
    const std::int64_t generation = own_above(highest);
    highest = generation;
    status = TryOnce(peers, introduction, generation, wish, own, deadline, highest);
    if (!absl::IsAborted(status)) return status;
  }
  return status;
}

}  // namespace muond
