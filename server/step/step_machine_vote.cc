// How the daemons of a run agree on a step: votes, the verdict, and raising the generation.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/step/step_machine.h"
#include "server/step/terms_hash.h"

namespace muond {

// Of what ranks must have told every daemon alike.
std::uint64_t StepMachine::Terms() const {
  TermsHash hash;
  if (const auto& begin = attempt_.begin(); begin && attempt_.skipped().empty()) {
    hash.Add(begin->loss_scale);
    hash.Add(begin->micro_batches);
    hash.Add("muon", begin->muon);
    hash.Add("adamw", begin->adamw);
    for (std::int64_t rank = 0; rank < index_->world_size(); ++rank) {
      const std::set<int>* absent = attempt_.AbsentOf(rank);
      hash.Add(absent == nullptr ? 0 : std::ssize(*absent));
      for (const int p : absent == nullptr ? std::set<int>{} : *absent) hash.Add(std::int64_t{p});
    }
  } else if (!attempt_.skipped().empty()) {
    hash.Add(attempt_.NamedScale().value_or(scaler_.scale()));
    hash.Add(static_cast<std::int64_t>(attempt_.skipped().begin()->second.cause));
  }
  return hash.Value();
}

void StepMachine::Cast(const Vote& vote, Effects& effects) {
  // A promise was given: the step ends with the generation that is about to be raised.
  if (promised_ > generation_) return;
  MUOND_CHECK(!votes_.contains(index_->self()), "a daemon votes once");
  phase_ = Phase::kVoting;
  votes_[index_->self()] = vote;
  if (index_->daemons() > 1) effects.push_back(VoteEffect{vote});
  Conclude(effects);
}

// The verdict falls once every daemon, this one too, has voted.
void StepMachine::Conclude(Effects& effects) {
  if (phase_ != Phase::kVoting || !no_verdict_.ok()) return;
  if (std::ssize(votes_) < index_->daemons()) return;
  no_verdict_ = Terms(votes_);
  if (!no_verdict_.ok()) return ReplyAll(no_verdict_, effects);
  std::vector<Vote> votes;
  for (const auto& [daemon, vote] : votes_) votes.push_back(vote);
  const Verdict verdict = Decide(rules_, votes);
  if (verdict.apply) return Commit(verdict, effects);
  const double told = attempt_.skipped().empty() ? attempt_.begin()->loss_scale
                                                 : attempt_.NamedScale().value_or(scaler_.scale());
  Consume(verdict, told, CommitFacts{}, effects);
}

// OK iff all votes were cast on the same terms.
absl::Status StepMachine::Terms(const std::map<int, Vote>& votes) const {
  std::vector<int> alike, others;
  for (const auto& [daemon, vote] : votes) {
    (vote.terms == votes.begin()->second.terms ? alike : others).push_back(daemon);
  }
  if (others.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "step %d: the trainers told daemons [%s] and [%s] different things (loss scale, "
      "micro-batches, hyperparameters, absent parameters or a skip): no daemon applies it; raise "
      "the generation and begin the step again",
      next_step_, DaemonNames(alike), DaemonNames(others)));
}

std::string StepMachine::DaemonNames(const std::vector<int>& daemons) const {
  return absl::StrJoin(daemons, ", ", [&](std::string* out, int daemon) {
    const std::string& name = index_->layout().daemons[daemon];
    out->append(name.empty() ? std::to_string(daemon) : name);
  });
}

absl::Status StepMachine::OnVote(const CastVote& cast, Effects& effects) {
  const Vote& vote = cast.vote;
  const std::string object = absl::StrFormat("step %d: vote of daemon %d", vote.step, cast.daemon);
  if (cast.daemon < 0 || cast.daemon >= index_->daemons()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the run has %d daemons", object, index_->daemons()));
  }
  if (vote.generation < generation_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: generation %d is over: expected step %d of generation %d", object,
                        vote.generation, next_step_, generation_));
  }
  if (vote.generation > generation_) {
    return absl::AbortedError(absl::StrFormat("%s: generation %d is not this daemon's %d yet",
                                              object, vote.generation, generation_));
  }
  if (vote.step < next_step_) return absl::OkStatus();
  if (promised_ > generation_) {
    // What was promised is all that counts of this generation; the rest comes as settled votes.
    return absl::AbortedError(
        absl::StrFormat("%s: generation %d is being raised to %d", object, generation_, promised_));
  }
  if (vote.step > next_step_ + 1) {
    return absl::OutOfRangeError(absl::StrFormat(
        "%s: ahead of this daemon, which is at step %d", object, next_step_));
  }
  std::map<int, Vote>& votes = vote.step == next_step_ ? votes_ : early_votes_;
  // Nobody can pass on what this daemon has yet to say, and casting its vote must find no other.
  if (cast.daemon == index_->self() && !votes.contains(cast.daemon)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: this is that daemon, and it has not voted", object));
  }
  const auto [there, added] = votes.emplace(cast.daemon, vote);
  if (!added && there->second != vote) {
    return absl::AlreadyExistsError(
        absl::StrFormat("%s: it has voted otherwise; a vote stands", object));
  }
  if (added && vote.step == next_step_) Conclude(effects);
  return absl::OkStatus();
}

std::vector<CastVote> StepMachine::VotesOf(std::int64_t step) const {
  std::vector<CastVote> cast;
  const auto add = [&](const std::map<int, Vote>& votes) {
    for (const auto& [daemon, vote] : votes) {
      if (vote.generation == generation_ && vote.step == step) cast.push_back({daemon, vote});
    }
  };
  add(votes_);
  add(last_votes_);
  return cast;
}

std::vector<int> StepMachine::MissingVotes() const {
  std::vector<int> missing;
  if (phase_ != Phase::kVoting) return missing;
  for (int daemon = 0; daemon < index_->daemons(); ++daemon) {
    if (!votes_.contains(daemon)) missing.push_back(daemon);
  }
  return missing;
}

std::string StepMachine::DescribeMissing() const {
  if (std::string missing = attempt_.DescribeMissing(); !missing.empty()) return missing;
  if (promised_ > generation_) {
    return absl::StrFormat("generation %d, which is being raised", promised_);
  }
  if (const std::vector<int> missing = MissingVotes(); !missing.empty()) {
    return absl::StrFormat("votes of daemons [%s]", DaemonNames(missing));
  }
  if (phase_ == Phase::kHolding) {
    return absl::StrFormat("daemon [%s] to hold a copy of the gradients",
                           DaemonNames({index_->buddy()}));
  }
  return phase_ == Phase::kCommitting ? "the end of the commit" : "the end of the reductions";
}

void StepMachine::OnUnreachable(int daemon, const std::string& why, Effects& effects) {
  if (phase_ == Phase::kHolding && daemon == index_->buddy()) {
    return ReplyAll(absl::UnavailableError(absl::StrFormat(
                        "step %d: daemon [%s], which is to hold a copy of this one's gradients: "
                        "%s; what has come in is kept",
                        next_step_, DaemonNames({daemon}), why)),
                    effects);
  }
  const std::vector<int> missing = MissingVotes();
  if (std::find(missing.begin(), missing.end(), daemon) == missing.end()) return;
  ReplyAll(absl::UnavailableError(absl::StrFormat(
               "step %d: daemon [%s] can't be reached and has not voted: %s; what has come in is "
               "kept",
               next_step_, DaemonNames({daemon}), why)),
           effects);
}

absl::StatusOr<StepMachine::Promise> StepMachine::OnPrepare(std::int64_t generation) {
  if (generation <= generation_ || generation < promised_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "generation %d: prepare: this daemon is at generation %d and has promised %d", generation,
        generation_, std::max(promised_, generation_)));
  }
  promised_ = generation;
  Promise promise{next_step_, {}, lineage_};
  for (const auto* votes : {&votes_, &last_votes_}) {
    for (const auto& [daemon, vote] : *votes) promise.votes.push_back({daemon, vote});
  }
  return promise;
}

void StepMachine::OnGeneration(std::int64_t generation, const std::vector<CastVote>& settled,
                               Effects& effects) {
  // Below a promise: it comes late from one who was overtaken, and what was promised is relied on.
  if (generation <= generation_ || generation < promised_) return;
  for (const CastVote& cast : settled) {
    if (cast.daemon < 0 || cast.daemon >= index_->daemons()) continue;
    if (cast.vote.step == next_step_ && cast.vote.generation == generation_) {
      votes_.emplace(cast.daemon, cast.vote);
    }
  }
  // Complete, they hold this daemon's own: it has voted, and the verdict is of the old generation.
  Conclude(effects);
  generation_ = generation;
  promised_ = generation;
  rejected_.clear();
  early_votes_.clear();
  no_verdict_ = absl::OkStatus();
  // A verdict has fallen: it is carried out.
  if (phase_ == Phase::kCommitting) return;
  votes_.clear();
  ReplyAll(absl::AbortedError(absl::StrFormat(
               "step %d: the generation was raised to %d: restart the step from begin", next_step_,
               generation)),
           effects);
  Discard(effects);
}

std::vector<CastVote> SettledVotes(int daemons, const std::vector<StepMachine::Promise>& promises) {
  MUOND_CHECK(std::ssize(promises) == daemons, "every daemon has promised");
  std::int64_t step = promises[0].next_step;
  for (const auto& promise : promises) step = std::min(step, promise.next_step);
  std::map<std::int64_t, std::map<int, Vote>> by_generation;
  for (const auto& promise : promises) {
    for (const CastVote& cast : promise.votes) {
      if (cast.vote.step == step) by_generation[cast.vote.generation][cast.daemon] = cast.vote;
    }
  }
  std::vector<CastVote> settled;
  for (const auto& [generation, votes] : by_generation) {
    if (std::ssize(votes) < daemons) continue;
    for (const auto& [daemon, vote] : votes) settled.push_back({daemon, vote});
    break;  // complete in one generation only: it was consumed there
  }
  return settled;
}

absl::Status CheckOneLineage(const std::vector<std::string>& daemons,
                             const std::vector<StepMachine::Promise>& promises) {
  MUOND_CHECK(daemons.size() == promises.size(), "every daemon has promised");
  std::map<std::int64_t, std::vector<std::string>> by_lineage;
  for (std::size_t daemon = 0; daemon < daemons.size(); ++daemon) {
    by_lineage[promises[daemon].lineage].push_back(daemons[daemon]);
  }
  if (by_lineage.size() == 1) return absl::OkStatus();
  std::vector<std::string> parts;
  for (const auto& [lineage, names] : by_lineage) {
    parts.push_back(absl::StrFormat(
        "daemons [%s] have %s", absl::StrJoin(names, ", "),
        lineage == 0 ? "none" : absl::StrFormat("that of generation %d", lineage)));
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "the daemons' states don't belong together: %s (the generation in which it was made by "
      "initial values or a restore): a new generation alone can't join them; re-initialize the run "
      "from the trainers' parameters (raise the generation with reinitialize), or restore a "
      "checkpoint on all",
      absl::StrJoin(parts, ", ")));
}

}  // namespace muond
