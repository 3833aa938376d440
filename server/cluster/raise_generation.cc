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
constexpr absl::Duration kRaiseWait = absl::Seconds(30);  // after a recovery's transfer

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

v1::RaiseRequest ToProto(const v1::PeerRun& introduction, const RaiseOrder& order) {
  v1::RaiseRequest raise;
  *raise.mutable_peer() = introduction;
  raise.set_generation(order.generation);
  VotesToProto(order.settled, raise.mutable_settled());
  raise.set_reinitialize(order.reinitialize);
  raise.set_resume_step(order.resume_step);
  raise.set_restore(order.restore);
  raise.set_adopt(order.adopt);
  raise.set_lineage(order.lineage);
  raise.set_recover(order.recover);
  return raise;
}

// First round. `highest`: raised to the highest promise that a daemon told of.
absl::StatusOr<std::vector<DaemonPromise>> AskPromises(Peers& peers,
                                                       const v1::PrepareRequest& prepare,
                                                       const RaiseHooks& own, absl::Time deadline,
                                                       std::int64_t& highest) {
  std::vector<DaemonPromise> promises(peers.count());
  std::vector<std::int64_t> told(peers.count(), 0);
  const auto promised = AskAll(peers.count(), deadline, [&](int daemon) {
    auto promise = daemon == peers.self()
                       ? own.prepare(prepare.generation())
                       : AskPromise(peers, daemon, prepare, deadline, told[daemon]);
    if (promise.ok()) promises[daemon] = *std::move(promise);
    return promise.status();
  });
  highest = std::max(highest, *std::max_element(told.begin(), told.end()));
  MUOND_RETURN_IF_ERROR(Summary(peers, prepare.peer().run(), "raise the generation", promised));
  return promises;
}

// Second round, of the daemons that `wanted` says.
absl::Status AskRaises(Peers& peers, const v1::PeerRun& introduction, const RaiseOrder& order,
                       const RaiseHooks& own, absl::Time deadline,
                       const std::function<bool(int)>& wanted) {
  const v1::RaiseRequest raise = ToProto(introduction, order);
  const auto raised = AskAll(peers.count(), deadline, [&](int daemon) {
    if (!wanted(daemon)) return absl::OkStatus();
    return daemon == peers.self() ? own.raise(order) : AskRaise(peers, daemon, raise, deadline);
  });
  return Summary(peers, introduction.run(), "raise the generation", raised);
}

bool Everybody(int) { return true; }

absl::Status CheckLineages(const std::string& run, const std::vector<std::string>& daemons,
                           const std::vector<StepMachine::Promise>& promises) {
  absl::Status one = CheckOneLineage(daemons, promises);
  if (one.ok()) return one;
  return absl::Status(one.code(), absl::StrFormat("run \"%s\": raise the generation: %s", run,
                                                  one.message()));
}

// The parameters that some of these daemons have adopted and others have not; none when they agree.
std::string HalfAdopted(const std::vector<DaemonPromise>& promised) {
  const auto [least, most] = std::minmax_element(
      promised.begin(), promised.end(),
      [](const DaemonPromise& a, const DaemonPromise& b) { return a.additions < b.additions; });
  return least->additions < most->additions ? most->adopted : "";
}

// What to order, now that all have promised.
absl::StatusOr<RaiseOrder> OrderFrom(const Peers& peers, const std::string& run,
                                     std::int64_t generation, const RaiseWish& wish,
                                     const std::vector<DaemonPromise>& promised) {
  RaiseOrder order{.generation = generation, .reinitialize = wish.reinitialize};
  std::vector<StepMachine::Promise> promises;
  for (const DaemonPromise& promise : promised) promises.push_back(promise.steps);
  if (!wish.reinitialize) {
    MUOND_RETURN_IF_ERROR(CheckLineages(run, peers.daemons(), promises));
    order.settled = SettledVotes(peers.count(), promises);
  }
  for (const auto& promise : promises) {
    order.resume_step = std::max(order.resume_step, promise.next_step);
  }
  if (!wish.restore.name.empty()) {
    order.restore = wish.restore.name;
    order.resume_step = wish.restore.step;
  }
  order.adopt = HalfAdopted(promised);
  if (order.adopt.empty()) order.adopt = wish.adopt;
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
  MUOND_ASSIGN_OR_RETURN(const auto promises, AskPromises(peers, prepare, own, deadline, highest));
  MUOND_ASSIGN_OR_RETURN(const RaiseOrder order,
                         OrderFrom(peers, introduction.run(), generation, wish, promises));
  return AskRaises(peers, introduction, order, own, deadline, Everybody);
}

// ---- Back from buddies ------------------------------------------------------------------------

constexpr absl::Duration kRecoverTimeout = absl::Minutes(30);

absl::Status AskRecover(Peers& peers, int daemon, const v1::BuddyRecoverRequest& request) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(kRecoverTimeout));
  v1::BuddyRecoverReply reply;
  return FromGrpc(peers.buddy(daemon).Recover(&context, request, &reply));
}

// Brings back the daemons that `lost` says, once the others have raised.
absl::Status RecoverLost(Peers& peers, const v1::PeerRun& introduction, RaiseOrder order,
                         const std::function<bool(int)>& lost, const RaiseHooks& own,
                         absl::Time deadline) {
  v1::BuddyRecoverRequest request;
  *request.mutable_peer() = introduction;
  request.set_version(order.resume_step);
  request.set_lineage(order.lineage);
  std::vector<absl::Status> recovered(peers.count());
  AtOnce(peers.count(), [&](int daemon) {
    if (!lost(daemon)) return;
    recovered[daemon] = daemon == peers.self() ? own.recover(order.resume_step, order.lineage)
                                               : AskRecover(peers, daemon, request);
  });
  MUOND_RETURN_IF_ERROR(Summary(peers, introduction.run(), "recover", recovered));
  order.settled.clear();
  order.adopt.clear();
  order.reinitialize = true;
  order.restore = kFromBuddy;
  // The transfer may have taken longer than whoever asked for all this wanted to wait.
  return AskRaises(peers, introduction, order, own, std::max(deadline, SteadyNow() + kRaiseWait),
                   lost);
}

// What those that have their state are told; order.resume_step: what the lost ones are brought to.
absl::StatusOr<RaiseOrder> RecoverOrder(const Peers& peers, const std::string& run,
                                        std::int64_t generation,
                                        const std::vector<DaemonPromise>& promises) {
  std::vector<DaemonPromise> there;
  std::vector<StepMachine::Promise> steps;
  std::vector<std::string> names;
  for (int daemon = 0; daemon < peers.count(); ++daemon) {
    if (promises[daemon].steps.lineage == 0) continue;
    there.push_back(promises[daemon]);
    steps.push_back(promises[daemon].steps);
    names.push_back(peers.daemons()[daemon]);
  }
  if (there.empty()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": recover: no daemon has any of its state", run));
  }
  MUOND_RETURN_IF_ERROR(CheckLineages(run, names, steps));
  RaiseOrder order{.generation = generation,
                   .adopt = HalfAdopted(there),
                   .lineage = steps[0].lineage,
                   .recover = true};
  order.resume_step = steps[0].next_step;
  for (const auto& promise : steps) {
    order.resume_step = std::min(order.resume_step, promise.next_step);
  }
  // Who lost all knows of no votes; those of its former life may be complete elsewhere.
  std::vector<StepMachine::Promise> all;
  for (const DaemonPromise& promise : promises) {
    const bool lost = promise.steps.lineage == 0;
    all.push_back(lost ? StepMachine::Promise{order.resume_step, {}, order.lineage}
                       : promise.steps);
  }
  order.settled = SettledVotes(peers.count(), all);
  if (!order.settled.empty()) ++order.resume_step;
  return order;
}

absl::Status TryRecover(Peers& peers, const v1::PeerRun& introduction, std::int64_t generation,
                        const RaiseHooks& own, absl::Time deadline, std::int64_t& highest) {
  v1::PrepareRequest prepare;
  *prepare.mutable_peer() = introduction;
  prepare.set_generation(generation);
  prepare.set_recover(true);
  MUOND_ASSIGN_OR_RETURN(const auto promises, AskPromises(peers, prepare, own, deadline, highest));
  MUOND_ASSIGN_OR_RETURN(const RaiseOrder order,
                         RecoverOrder(peers, introduction.run(), generation, promises));
  const auto lost = [&](int daemon) { return promises[daemon].steps.lineage == 0; };
  MUOND_RETURN_IF_ERROR(AskRaises(peers, introduction, order, own, deadline,
                                  [&](int daemon) { return !lost(daemon); }));
  return RecoverLost(peers, introduction, order, lost, own, deadline);
}

// Each daemon has numbers of its own: two that coordinate at a time never give one to two orders.
std::int64_t OwnAbove(const Peers& peers, std::int64_t generation) {
  do ++generation;
  while (generation % peers.count() != peers.self());
  return generation;
}

}  // namespace

absl::Status RaiseGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                             const RaiseWish& wish, const RaiseHooks& own, absl::Time deadline) {
  const v1::PeerRun introduction = peers.Introduction(run, plan_hash);
  absl::Status status = absl::UnavailableError(
      absl::StrFormat("run \"%s\": raise the generation: there was no time to try", run));
  // A daemon that is ahead, by another's unfinished try, refuses: go above it.
  std::int64_t highest = wish.current;
  while (SteadyNow() < deadline) {
    highest = OwnAbove(peers, highest);
    status = TryOnce(peers, introduction, highest, wish, own, deadline, highest);
    if (!absl::IsAborted(status)) return status;
  }
  return status;
}

absl::Status RecoverGeneration(Peers& peers, const std::string& run, const std::string& plan_hash,
                               std::int64_t current, const RaiseHooks& own, absl::Time deadline) {
  const v1::PeerRun introduction = peers.Introduction(run, plan_hash);
  absl::Status status = absl::UnavailableError("recover: there was no time to try");
  std::int64_t highest = current;
  while (SteadyNow() < deadline) {
    highest = OwnAbove(peers, highest);
    status = TryRecover(peers, introduction, highest, own, deadline, highest);
    if (!absl::IsAborted(status)) return status;
  }
  return status;
}

}  // namespace muond
