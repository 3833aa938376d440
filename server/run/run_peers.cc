// The other daemons of the run: votes, and state that was lost; run_generation.cc raises
// generations.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/check.h"
#include "proto/status.h"
#include "server/run/registry_layout.h"
#include "server/run/run.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr absl::Duration kHelloTimeout = absl::Seconds(1);

// "HASH of 2 devices a daemon over LIST" (PlanNameOf, Peers::Agreement), taken apart.
struct Agreed {
  explicit Agreed(const std::string& text) {
    const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits(" over ", 1));
    const std::vector<std::string> plan = absl::StrSplit(parts[0], absl::MaxSplits(" of ", 1));
    hash = plan[0];
    devices = std::string(absl::StripSuffix(plan.back(), " devices a daemon"));
    daemons = parts.size() > 1 ? parts[1] : "";
  }
  std::string hash, devices, daemons;
};

// Why two daemons can't share a run, the nearest cause: each makes those behind it differ, too.
std::string Difference(const std::string& theirs, const std::string& own) {
  const Agreed there(theirs), here(own);
  if (there.daemons != here.daemons) {
    return absl::StrFormat(
        "has another list of daemons (%s; here %s): start all with one list of peers in one order",
        there.daemons, here.daemons);
  }
  if (there.devices != here.devices) {
    return absl::StrFormat(
        "has %s devices, this one %s: a run needs equally many on every daemon (--devices)",
        there.devices, here.devices);
  }
  return absl::StrFormat(
      "has another plan (%s; here %s): all must run one version with equal settings", there.hash,
      here.hash);
}

}  // namespace

// What daemons compare: equal on all, or they would not agree on who owns what.
std::string Run::PlanNameOf(const Registry& registry) const {
  return absl::StrFormat("%s of %d devices a daemon", registry.plan().hash, devices());
}

absl::Status Run::CheckPeer(int daemon, const std::string& agreement, bool exact) const {
  if (daemon < 0 || daemon >= context_.peers->count() || daemon == context_.peers->self()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": daemon %d: no other daemon of this run", name(), daemon));
  }
  const auto agrees = [&](const Registry* with) {
    return with != nullptr && agreement == context_.peers->Agreement(PlanNameOf(*with));
  };
  if (agrees(&registry())) return absl::OkStatus();
  MutexLock lock(mutex_);
  const bool behind = agrees(registries_.former());
  const bool ahead = addition_ != nullptr && agrees(addition_->registry.get());
  lock.unlock();
  if (!exact && (behind || ahead)) return absl::OkStatus();
  if (behind) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": daemon \"%s\" has it as it was before parameters were added: register with "
        "these, too",
        name(), context_.peers->daemons()[daemon]));
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "run \"%s\": daemon \"%s\" %s", name(), context_.peers->daemons()[daemon],
      Difference(agreement, context_.peers->Agreement(PlanName()))));
}

StepLayout Run::LayoutHere() const {
  StepLayout layout = StepLayoutOf(registry(), context_.peers->daemons(), context_.peers->self());
  if (buddy_ != nullptr) layout.buddy = BuddyOf(layout.self, context_.peers->count());
  return layout;
}

// The lock is held; all ranks have joined.
void Run::MakeMachine() {
  StepLayout layout = LayoutHere();
  initial_.Expect(layout, values_from_);
  machine_ = std::make_unique<StepMachine>(std::move(layout), spec(), start_);
  if (promised_ > start_.generation) {
    MUOND_CHECK(machine_->OnPrepare(promised_).ok(), "a promise that was given is kept");
  }
  if (buddy_ != nullptr) StartBuddy();
}

// ---- Votes ------------------------------------------------------------------------------------

// The lock is held.
void Run::CarryVote(const VoteEffect& effect, After& after) {
  const std::int64_t step = effect.vote.step;
  observer_->OnVote(absl::Now());
  auto self = weak_from_this();
  VoteExchange::Listener listener;
  listener.known = [self, step] {
    const auto run = self.lock();
    return run == nullptr ? std::vector<CastVote>{} : run->VotesOf(step);
  };
  listener.heard = [self](int daemon, const PeerPosition& position,
                          const std::vector<CastVote>& votes) {
    if (const auto run = self.lock()) run->OnPeerAnswer(daemon, position, votes);
  };
  listener.trouble = [self](int daemon, const absl::Status& status) {
    if (const auto run = self.lock()) run->OnPeerTrouble(daemon, status);
  };
  listener.answered = [metrics = context_.metrics](absl::Duration elapsed) {
    metrics->ObservePeerRtt(elapsed);
  };
  EndVotes();
  vote_exchange_ = VoteExchange::Make(context_.peers, name(), PlanName(), step,
                                      std::move(listener));
  // It asks for the votes at once, which takes the lock.
  after.push_back([exchange = vote_exchange_] { exchange->Start(); });
}

// The lock is held. The step is over, or thrown away.
void Run::EndVotes() {
  if (vote_exchange_ != nullptr) vote_exchange_->Stop();
  vote_exchange_ = nullptr;
}

std::vector<CastVote> Run::VotesOf(std::int64_t step) const {
  MutexLock lock(mutex_);
  return machine_ == nullptr ? std::vector<CastVote>{} : machine_->VotesOf(step);
}

absl::Status Run::OnVotes(const std::vector<CastVote>& votes) {
  After after;
  absl::Status first;
  {
    // Also when stopped: a step that this daemon has voted on is ended by the others' votes.
    MutexLock lock(mutex_);
    if (machine_ == nullptr || !running_) {
      return absl::UnavailableError(absl::StrFormat("run \"%s\": opening", name()));
    }
    Effects effects;
    for (const CastVote& cast : votes) {
      if (absl::Status status = machine_->OnVote(cast, effects); !status.ok() && first.ok()) {
        first = std::move(status);
      }
    }
    Carry(effects, after);
    PublishProgress();
  }
  CallAll(after);
  return first;
}

void Run::OnPeerAnswer(int daemon, const PeerPosition& position,
                       const std::vector<CastVote>& votes) {
  if (absl::Status status = OnVotes(votes); absl::IsAlreadyExists(status)) {
    spdlog::error("run \"{}\": {}", name(), std::string(status.message()));
  }
  if (position.state == v1::RUN_STATE_FAILED) {
    return OnPeerTrouble(daemon, absl::FailedPreconditionError("its run has failed"));
  }
  MutexLock lock(mutex_);
  if (machine_ == nullptr || machine_->version() == 0) return;
  const bool empty = position.state == v1::RUN_STATE_OPENING && position.next_step == 0;
  // One that is below this generation is yet to be told of it: what it had lost is what this
  // generation brought back.
  const bool lost = position.state == v1::RUN_STATE_NEEDS_RESTORE &&
                    position.generation >= machine_->generation();
  if (empty || lost) {
    LoseState(absl::StrFormat("daemon \"%s\" has lost its state",
                              context_.peers->daemons()[daemon]));
  }
}

void Run::OnPeerTrouble(int daemon, const absl::Status& status) {
  After after;
  {
    MutexLock lock(mutex_);
    if (machine_ == nullptr || !stopped_.ok()) return;
    if (absl::IsNotFound(status)) {
      // It may not have heard of the run yet; once a step was taken it must have. While ranks leave
      // it, the run ends there first.
      if (machine_->version() > 0 && left_.empty()) {
        LoseState(absl::StrFormat("daemon \"%s\" does not know the run any more",
                                  context_.peers->daemons()[daemon]));
      }
      return;
    }
    Effects effects;
    machine_->OnUnreachable(daemon, std::string(status.message()), effects);
    Carry(effects, after);
  }
  CallAll(after);
}

// ---- Lost state -------------------------------------------------------------------------------

// The lock is held. Some daemon has no state that fits the others': the run stands still until a
// restore, or until it is initialized anew.
void Run::LoseState(const std::string& why) {
  if (!lost_.empty()) return;
  lost_ = why;
  spdlog::error("run \"{}\": needs a restore: {}", name(), why);
  metrics_->SetState(StateLocked());
  image_changed_.notify_all();
  if (context_.checkpoint_wanted) context_.checkpoint_wanted();
}

absl::Status Run::NeedsRestore() const {
  return absl::FailedPreconditionError(absl::StrFormat(
      "run \"%s\": needs a restore before step %d: %s; without a checkpoint, raise the generation "
      "with reinitialize and go on from the trainers' parameters",
      name(), std::max(start_.next_step, machine_ == nullptr ? 0 : machine_->next_step()), lost_));
}

// This daemon makes the run: the others may have had it for long.
absl::Status Run::LearnFromPeers() {
  if (context_.peers->count() == 1) return absl::OkStatus();
  std::vector<HelloAnswer> answers =
      AskHello(*context_.peers, name(), PlanName(), kHelloTimeout);
  MutexLock lock(mutex_);
  for (const HelloAnswer& answer : answers) {
    if (absl::IsFailedPrecondition(answer.status)) {
      spdlog::warn("{}", std::string(answer.status.message()));
      return answer.status;
    }
    if (!answer.status.ok()) continue;
    start_.generation = std::max(start_.generation, answer.position.generation);
    start_.next_step = std::max(start_.next_step, answer.position.next_step);
    start_.lineage = std::max(start_.lineage, answer.position.lineage);
  }
  if (start_.next_step == 0) return absl::OkStatus();
  start_.lineage = 0;
  LoseState("this daemon has none of its state");
  return absl::OkStatus();
}

}  // namespace muond
