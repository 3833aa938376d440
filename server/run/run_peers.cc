// The other daemons of the run: votes, and state that was lost; run_generation.cc raises
// generations.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "proto/status.h"
#include "server/run/registry_layout.h"
#include "server/run/run.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr absl::Duration kHelloTimeout = absl::Seconds(1);

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
  if (!exact) {
    std::lock_guard lock(mutex_);
    if (agrees(registries_.former())) return absl::OkStatus();
    if (addition_ != nullptr && agrees(addition_->registry.get())) return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "run \"%s\": daemon \"%s\" has another plan or list of daemons (%s; here %s): all must run "
      "one version with one list of peers and equally many devices",
      name(), context_.peers->daemons()[daemon], agreement,
      context_.peers->Agreement(PlanName())));
}

// The lock is held; all ranks have joined.
void Run::MakeMachine() {
  StepLayout layout =
      StepLayoutOf(registry(), context_.peers->daemons(), context_.peers->self());
  initial_.Expect(layout, values_from_);
  machine_ = std::make_unique<StepMachine>(std::move(layout), spec(), start_);
  if (promised_ > start_.generation) {
    MUOND_CHECK(machine_->OnPrepare(promised_).ok(), "a promise that was given is kept");
  }
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
  std::lock_guard lock(mutex_);
  return machine_ == nullptr ? std::vector<CastVote>{} : machine_->VotesOf(step);
}

absl::Status Run::OnVotes(const std::vector<CastVote>& votes) {
  After after;
  absl::Status first;
  {
    // Also when stopped: a step that this daemon has voted on is ended by the others' votes.
    std::lock_guard lock(mutex_);
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
  std::lock_guard lock(mutex_);
  if (machine_ == nullptr || machine_->version() == 0) return;
  const bool empty = position.state == v1::RUN_STATE_OPENING && position.next_step == 0;
  if (empty || position.state == v1::RUN_STATE_NEEDS_RESTORE) {
    LoseState(absl::StrFormat("daemon \"%s\" has lost its state",
                              context_.peers->daemons()[daemon]));
  }
}

void Run::OnPeerTrouble(int daemon, const absl::Status& status) {
  After after;
  {
    std::lock_guard lock(mutex_);
    if (machine_ == nullptr || !stopped_.ok()) return;
    if (absl::IsNotFound(status)) {
      // It may not have heard of the run yet; once a step was taken it must have.
      if (machine_->version() > 0) {
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
void Run::LearnFromPeers() {
  if (context_.peers->count() == 1) return;
  std::vector<HelloAnswer> answers =
      AskHello(*context_.peers, name(), PlanName(), kHelloTimeout);
  std::lock_guard lock(mutex_);
  for (const HelloAnswer& answer : answers) {
    if (!answer.status.ok()) continue;
    start_.generation = std::max(start_.generation, answer.position.generation);
    start_.next_step = std::max(start_.next_step, answer.position.next_step);
    start_.lineage = std::max(start_.lineage, answer.position.lineage);
  }
  if (start_.next_step == 0) return;
  start_.lineage = 0;
  LoseState("this daemon has none of its state");
}

}  // namespace muond
