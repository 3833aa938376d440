// The heart of a run's loop, fed with sequences of messages in any order: two daemons' step
// machines hear trainers, their engines, each other, operators and hostile peers. After each
// message the promises of server/step/step_machine.h are checked.
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "proto/check.h"
#include "server/step/step_machine.h"
#include "tests/fuzz/input.h"

namespace muond::fuzz {
namespace {

constexpr int kDaemons = 2;
constexpr std::int64_t kRanks = 2;
constexpr int kMessagesMax = 400;

// "a" lies on daemon 0, "b" on daemon 1, "c" is cut between them, "d" is whole on every rank. With
// `buddies` each holds a copy of the other's gradients.
StepLayout LayoutOf(int daemon, bool buddies) {
  using Here = StepLayout::Here;
  StepLayout layout{kRanks, {}, {"d0", "d1"}, daemon, buddies ? 1 - daemon : -1};
  const auto add = [&](const char* name, bool replicated, Here here) {
    StepLayout::Parameter parameter{name, replicated, static_cast<int>(layout.parameters.size()),
                                    {1, 1}, here};
    if (here == Here::kSome) parameter.slices_here[daemon] = {0};
    layout.parameters.push_back(std::move(parameter));
  };
  add("a", false, daemon == 0 ? Here::kAll : Here::kNone);
  add("b", false, daemon == 1 ? Here::kAll : Here::kNone);
  add("c", false, Here::kSome);
  add("d", true, daemon == 0 ? Here::kAll : Here::kNone);
  return layout;
}

RunSpec SpecOf(Input& input) {
  RunSpec spec;
  spec.groups.emplace_back().name = "g";
  if (input.Below(2) == 1) {
    spec.loss_scale.mode = LossScaleMode::kDynamic;
    spec.loss_scale.initial = 65536;
  }
  if (input.Below(2) == 1) spec.max_grad_norm = 1;
  return spec;
}

// One daemon: its machine, and what its engine was told to do.
class Daemon {
 public:
  Daemon(int self, bool buddies, const RunSpec& spec)
      : machine(LayoutOf(self, buddies), spec), buddies_(buddies) {}

  void Carry(Effects& effects) {
    for (const Effect& effect : effects) {
      std::visit([this](const auto& e) { On(e); }, effect);
    }
  }
  std::uint64_t Ask() {
    asked.push_back(++waiters_);
    return waiters_;
  }

  // The buddy answers for the newest attempt, or one before.
  void Hold(bool newest, Effects& effects) {
    if (holds_.empty()) return;
    if (newest) held_ = true;
    machine.OnHeld(newest ? holds_.back() : holds_.front() - 1, effects);
  }

  StepMachine machine;
  std::deque<ReduceEffect> reductions;
  std::optional<CommitEffect> commit;
  std::vector<std::uint64_t> asked;
  std::map<std::int64_t, StepOutcome> outcomes;

 private:
  void On(const ReduceEffect& effect) { reductions.push_back(effect); }
  void On(const CommitEffect& effect) {
    MUOND_CHECK(!commit, "one commit at a time");
    MUOND_CHECK(committed_.insert(effect.step).second, "a step is committed at most once");
    MUOND_CHECK(effect.step == *committed_.rbegin(), "steps are committed in their order");
    commit = effect;
  }
  void On(const DiscardEffect&) {}
  void On(const ReplyEffect& effect) {
    MUOND_CHECK(effect.status.ok() == effect.outcome.has_value(), "an outcome or a reason");
    MUOND_CHECK(effect.waiter >= 1 && effect.waiter <= waiters_, "who is answered has asked");
    MUOND_CHECK(answered_.insert(effect.waiter).second, "who asks is answered once");
  }
  void On(const OutcomeEffect& effect) {
    const StepOutcome& outcome = effect.outcome;
    MUOND_CHECK(outcome.applied == committed_.contains(outcome.step), "applied is committed");
    MUOND_CHECK(outcomes.emplace(outcome.step, outcome).second, "a step ends once");
  }
  void On(const VoteEffect& effect) {
    const bool skips = effect.vote.trainer_skip != SkipCause::kNone || effect.vote.nonfinite > 0 ||
                       effect.vote.state_overflows > 0;
    MUOND_CHECK(!buddies_ || skips || held_, "what may be applied is held by the buddy first");
  }
  void On(const HoldEffect& effect) {
    MUOND_CHECK(buddies_, "only a buddy is asked to hold anything");
    holds_.push_back(effect.attempt);
    held_ = false;
  }

  const bool buddies_;
  std::vector<std::int64_t> holds_;  // attempts, in their order
  bool held_ = false;                // the newest of them
  std::uint64_t waiters_ = 0;
  std::set<std::uint64_t> answered_;
  std::set<std::int64_t> committed_;
};

class World {
 public:
  explicit World(Input& input) : input_(input), spec_(SpecOf(input)) {
    const bool buddies = input.Below(2) == 1;
    for (int self = 0; self < kDaemons; ++self) daemons_.emplace_back(self, buddies, spec_);
  }

  void Play() {
    for (int messages = 0; !input_.empty() && messages < kMessagesMax; ++messages) {
      One();
      CheckAlike();
    }
  }

 private:
  // A message to one daemon. Steps and generations are right more often than not.
  void One() {
    const int what = input_.Below(16);
    Daemon& to = daemons_[input_.Below(kDaemons)];
    Effects effects;
    if (what <= 5) {
      Train(what, to, effects);
    } else if (what <= 10) {
      Work(what, to, effects);
    } else {
      Disturb(what, to, effects);
    }
    to.Carry(effects);
    // An engine whose attempt is gone may drop its work.
    if (to.machine.failed()) to.reductions.clear();
  }

  void Train(int what, Daemon& to, Effects& effects) {
    const std::uint8_t bits = input_.Byte();
    const std::int64_t rank = bits % 4 < 2 ? bits % 4 : (bits & 64) != 0 ? kRanks : 0;
    const std::int64_t step = to.machine.next_step() + ((bits & 16) != 0 ? input_.Below(5) - 2 : 0);
    const std::int64_t generation = to.machine.generation() + ((bits & 32) != 0 ? -1 : 0);
    switch (what) {
      case 0:
      case 1:
        to.machine.OnBegin(rank, generation, BeginOf(to, step), effects).IgnoreError();
        break;
      case 2:
      case 3: {
        const SliceId id{input_.Below(5) - (bits & 128 ? 1 : 0), rank, (bits & 128) ? 1 : 0,
                         (bits & 8) ? 1 : 0};
        const bool known = id.parameter >= 0 && id.parameter < 4;
        if (!known) break;  // the run resolves names first
        if (to.machine.Admit(id, generation, step).ok()) {
          to.machine.OnSlice(id, generation, step, 7 + (input_.Byte() == 255), effects)
              .IgnoreError();
        }
        break;
      }
      case 4:
        to.machine.OnFinish(rank, generation, step, Absent(), to.Ask(), effects);
        break;
      default:
        to.machine.OnSkip(rank, generation, step,
                          input_.Below(2) ? SkipCause::kOverflow : SkipCause::kTrainer,
                          input_.Below(4) == 3 ? 2 : 0, to.Ask(), effects);
    }
  }

  void Work(int what, Daemon& to, Effects& effects) {
    if (what == 6 && !to.asked.empty()) {
      to.machine.OnDeadline(to.asked[input_.Below(256) % to.asked.size()], effects);
    } else if (what == 7 && !to.asked.empty()) {
      to.machine.OnWaiterGone(to.asked[input_.Below(256) % to.asked.size()]);
    } else if (what <= 9 && !to.reductions.empty()) {
      const ReduceEffect done = to.reductions.front();
      to.reductions.pop_front();
      GradientFacts facts{.block_sums = {1.0, static_cast<double>(input_.Byte())}};
      if (facts.block_sums[1] == 255) facts.nonfinite = 3;
      if (facts.block_sums[1] == 254) facts.state_overflow = true;
      to.machine.OnReduced(done.attempt, done.state, facts, effects);
    } else if (what == 9) {
      to.Hold(input_.Below(8) > 0, effects);
    } else if (what == 10 && to.commit) {
      to.commit.reset();
      CommitFacts facts{.newton_schulz_calls = 1};
      if (input_.Byte() == 255) facts.failure = "the device is gone";
      to.machine.OnCommitted(facts, effects);
    }
  }

  void Disturb(int what, Daemon& to, Effects& effects) {
    Daemon& other = daemons_[&to == &daemons_[0] ? 1 : 0];
    if (what <= 13) {
      const std::int64_t step = other.machine.next_step() - input_.Below(2);
      for (const CastVote& cast : other.machine.VotesOf(step)) {
        to.machine.OnVote(cast, effects).IgnoreError();
      }
      return;
    }
    if (what == 14) return Raise();
    switch (input_.Byte()) {
      case 255:
        to.machine.OnEngineFailure("out of memory", effects);
        to.reductions.clear();
        break;
      case 254:
        to.machine.OnStop(absl::UnavailableError("draining"), effects);
        break;
      case 253:
        Forge(to, effects);
        break;
      default:
        to.machine.OnUnreachable(&to == &daemons_[0] ? 1 : 0, "silent", effects);
    }
  }

  // What no honest daemon says: from here on the daemons may differ, and still none may break.
  void Forge(Daemon& to, Effects& effects) {
    forged_ = true;
    CastVote cast{.daemon = input_.Below(kDaemons)};
    cast.vote.generation = to.machine.generation() + input_.Below(3) - 1;
    cast.vote.step = to.machine.next_step() + input_.Below(4) - 1;
    cast.vote.terms = input_.Byte();
    cast.vote.nonfinite = input_.Below(2);
    cast.vote.sum_squares.Add(input_.Byte());
    to.machine.OnVote(cast, effects).IgnoreError();
  }

  // Both rounds, or the first alone.
  void Raise() {
    const int how = input_.Below(4);
    std::int64_t generation = 1;
    for (const Daemon& daemon : daemons_) {
      generation = std::max({generation, daemon.machine.generation() + 1,
                             daemon.machine.promised() + 1});
    }
    std::vector<StepMachine::Promise> promises;
    for (Daemon& daemon : daemons_) {
      auto promise = daemon.machine.OnPrepare(generation);
      if (!promise.ok()) return;
      promises.push_back(*std::move(promise));
    }
    if (how == 0) return;  // whoever asked has gone
    const std::vector<CastVote> settled = SettledVotes(kDaemons, promises);
    for (int daemon = 0; daemon < (how == 1 ? 1 : kDaemons); ++daemon) {
      Effects effects;
      daemons_[daemon].machine.OnGeneration(generation, settled, effects);
      daemons_[daemon].Carry(effects);
    }
  }

  StepBegin BeginOf(const Daemon& to, std::int64_t step) {
    StepBegin begin;
    begin.step = step;
    begin.loss_scale = to.machine.scaler().scale();
    const int what = input_.Below(16);
    if (what == 15) begin.loss_scale = -1;
    if (what == 14) begin.micro_batches = 2;
    if (what == 13) begin.micro_batches = 0;
    if (what == 12) begin.muon["no such group"] = {};
    if (what == 11) begin.muon["g"].lr = 0.5;
    return begin;
  }

  std::vector<std::string> Absent() {
    switch (input_.Below(8)) {
      case 7:
        return {"a", "b", "c", "d"};
      case 6:
        return {"no such name"};
      case 5:
        return {"c"};
      default:
        return {};
    }
  }

  void CheckAlike() const {
    if (forged_) return;
    for (const auto& [step, outcome] : daemons_[0].outcomes) {
      const auto found = daemons_[1].outcomes.find(step);
      if (found == daemons_[1].outcomes.end()) continue;
      const StepOutcome& other = found->second;
      MUOND_CHECK(outcome.applied == other.applied && outcome.cause == other.cause &&
                      outcome.grad_norm == other.grad_norm &&
                      outcome.clip_coefficient == other.clip_coefficient &&
                      outcome.next_loss_scale == other.next_loss_scale,
                  "one verdict on all daemons");
    }
  }

  Input& input_;
  const RunSpec spec_;
  std::deque<Daemon> daemons_;
  bool forged_ = false;
};

}  // namespace
}  // namespace muond::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  muond::fuzz::Input input(data, size);
  muond::fuzz::World(input).Play();
  return 0;
}
