#include "tests/simulation/checker.h"

#include "absl/strings/str_format.h"

namespace muond::simulation {
namespace {

constexpr std::pair<const char*, std::int64_t Coverage::*> kCounts[] = {
    {"applied", &Coverage::applied},
    {"skipped", &Coverage::skipped},
    {"generations", &Coverage::generations},
    {"settled", &Coverage::settled},
    {"raised during a commit", &Coverage::raised_during_commit},
    {"re-initializations", &Coverage::reinitializations},
    {"grown", &Coverage::grown},
    {"grown after a commit", &Coverage::grown_after_commit},
    {"grown as another had", &Coverage::followed},
    {"promises taken up", &Coverage::taken_up},
    {"discarded votes", &Coverage::discarded_votes},
    {"early votes", &Coverage::early_votes},
    {"refused votes", &Coverage::refused_votes},
    {"stale pushes", &Coverage::stale_pushes},
    {"deadlines", &Coverage::deadlines},
    {"unreachable", &Coverage::unreachable},
    {"cancelled", &Coverage::cancelled},
    {"disagreements", &Coverage::disagreements},
    {"new gradients", &Coverage::new_gradients},
    {"daemon crashes", &Coverage::daemon_crashes},
    {"trainer crashes", &Coverage::trainer_crashes},
    {"engine failures", &Coverage::engine_failures},
};

}  // namespace

void Coverage::Add(const Coverage& other) {
  for (const auto& [name, count] : kCounts) this->*count += other.*count;
}

std::string Coverage::ToString() const {
  std::string text;
  for (const auto& [name, count] : kCounts) {
    absl::StrAppendFormat(&text, "%s%d %s", text.empty() ? "" : ", ", this->*count, name);
  }
  return text;
}

std::vector<std::string> Coverage::Missing() const {
  std::vector<std::string> missing;
  for (const auto& [name, count] : kCounts) {
    // Once in some 500 seeds: that "grows-alone" is caught shows that they come across it.
    if (count == &Coverage::followed) continue;
    if (this->*count == 0) missing.emplace_back(name);
  }
  return missing;
}

void Checker::Violation(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

Checker::Ballot& Checker::BallotOf(std::int64_t generation, std::int64_t step) {
  Ballot& ballot = ballots_[{generation, step}];
  ballot.contents.resize(scenario_.model.world_size);
  return ballot;
}

void Checker::OnUse(std::int64_t rank, std::int64_t generation, std::int64_t step,
                    const Content& content) {
  std::optional<Content>& used = BallotOf(generation, step).contents[rank];
  if (used && *used != content) {
    Violation(absl::StrFormat("rank %d pushes other gradients for step %d of generation %d", rank,
                              step, generation));
  }
  used = content;
}

void Checker::OnLineage(int daemon, std::int64_t lineage, std::int64_t first_step) {
  Lineage& entry = lineages_[lineage];
  if (entry.reference == nullptr) {
    entry.first_step = first_step;
    entry.reference = std::make_unique<Reference>(scenario_, lineage, first_step);
  } else if (entry.first_step != first_step) {
    Violation(absl::StrFormat("daemon %d starts lineage %d at step %d, others at step %d", daemon,
                              lineage, first_step, entry.first_step));
  }
}

void Checker::OnPromise(int daemon, std::int64_t generation) { promises_[daemon] = generation; }

void Checker::OnRaised(int daemon, std::int64_t generation, bool grown) {
  const auto& [first, alike] = grown_.try_emplace(generation, daemon, grown).first->second;
  if (grown == alike) return;
  Violation(absl::StrFormat("daemons %d and %d have different parameters in generation %d", first,
                            daemon, generation));
}

void Checker::OnVote(int daemon, std::int64_t lineage, const Vote& vote) {
  if (vote.generation < promises_[daemon]) {
    Violation(absl::StrFormat("daemon %d votes in generation %d, having promised %d", daemon,
                              vote.generation, promises_[daemon]));
  }
  if (!BallotOf(vote.generation, vote.step).cast.emplace(daemon, lineage).second) {
    Violation(absl::StrFormat("daemon %d votes twice on step %d of generation %d", daemon,
                              vote.step, vote.generation));
  }
}

void Checker::OnDiscard(int daemon, std::int64_t lineage, std::int64_t generation,
                        std::int64_t step) {
  Ballot& ballot = BallotOf(generation, step);
  if (ballot.cast.contains(daemon)) {
    ballot.withdrawn.insert(daemon);
    ++coverage.discarded_votes;
  }
  if (lineages_[lineage].verdicts.contains(step)) {
    Violation(
        absl::StrFormat("daemon %d throws away step %d of generation %d, which others have "
                        "consumed",
                        daemon, step, generation));
  }
}

const Reference::Consumed* Checker::Verdict(int daemon, std::int64_t lineage,
                                            std::int64_t generation, std::int64_t step) {
  Lineage& entry = lineages_[lineage];
  const Ballot& ballot = BallotOf(generation, step);
  for (int other = 0; other < scenario_.model.daemons && scenario_.model.daemons > 1; ++other) {
    const auto cast = ballot.cast.find(other);
    if (cast == ballot.cast.end()) {
      Violation(
          absl::StrFormat("daemon %d has a verdict on step %d of generation %d without a "
                          "vote of daemon %d",
                          daemon, step, generation, other));
    } else if (cast->second != lineage) {
      Violation(
          absl::StrFormat("daemon %d of lineage %d has a verdict on step %d by a vote of "
                          "daemon %d of lineage %d",
                          daemon, lineage, step, other, cast->second));
    } else if (ballot.withdrawn.contains(other)) {
      Violation(
          absl::StrFormat("daemon %d has a verdict on step %d of generation %d, which "
                          "daemon %d threw away",
                          daemon, step, generation, other));
    }
  }
  const auto [verdict, first] = entry.verdicts.emplace(step, generation);
  if (verdict->second != generation) {
    Violation(
        absl::StrFormat("daemon %d has a verdict on step %d of generation %d, others have "
                        "one of generation %d",
                        daemon, step, generation, verdict->second));
  }
  if (first && violation_.empty()) {
    std::vector<Content> contents;
    for (const auto& content : ballot.contents) {
      if (!content) {
        Violation(
            absl::StrFormat("daemon %d has a verdict on step %d of generation %d, which not "
                            "all ranks have begun",
                            daemon, step, generation));
        return nullptr;
      }
      contents.push_back(*content);
    }
    if (entry.reference->next_step() != step) {
      Violation(absl::StrFormat("daemon %d has a verdict on step %d, the reference is at %d",
                                daemon, step, entry.reference->next_step()));
      return nullptr;
    }
    entry.reference->Train(contents);
  }
  return violation_.empty() ? entry.reference->Of(step) : nullptr;
}

void Checker::OnCommit(int daemon, std::int64_t lineage, std::int64_t generation,
                       const CommitEffect& commit) {
  const Reference::Consumed* consumed = Verdict(daemon, lineage, generation, commit.step);
  if (consumed == nullptr) return;
  const std::string object = absl::StrFormat("daemon %d: commit of step %d", daemon, commit.step);
  if (!consumed->commit) return Violation(object + ": the reference skips it");
  if (commit.clip_coefficient != consumed->commit->clip_coefficient) {
    Violation(object + ": another clip coefficient than the reference's");
  }
  if (commit.muon != consumed->commit->muon || commit.adamw != consumed->commit->adamw) {
    Violation(object + ": other hyperparameters than the reference's");
  }
  if (!lineages_[lineage].commits.emplace(std::pair(daemon, commit.step), generation).second) {
    Violation(object + ": it was committed before");
  }
}

void Checker::OnOutcome(int daemon, std::int64_t lineage, std::int64_t generation,
                        const StepOutcome& outcome) {
  const auto& commits = lineages_[lineage].commits;
  const auto commit = commits.find({daemon, outcome.step});
  // An applied step had its verdict before its commit, when the generation may have been lower.
  const Reference::Consumed* consumed =
      Verdict(daemon, lineage, commit != commits.end() ? commit->second : generation, outcome.step);
  ++(outcome.applied ? coverage.applied : coverage.skipped);
  if (outcome.applied != (commit != commits.end())) {
    Violation(absl::StrFormat("daemon %d: step %d is applied if and only if committed", daemon,
                              outcome.step));
  }
  if (consumed != nullptr && consumed->outcome != outcome) {
    Violation(
        absl::StrFormat("daemon %d: another outcome of step %d than the reference's: norm "
                        "%.17g for %.17g, %d non-finite for %d, next scale %g for %g",
                        daemon, outcome.step, outcome.grad_norm, consumed->outcome.grad_norm,
                        outcome.nonfinite_elements, consumed->outcome.nonfinite_elements,
                        outcome.next_loss_scale, consumed->outcome.next_loss_scale));
  }
}

void Checker::OnState(int daemon, std::int64_t lineage, std::int64_t version,
                      const ToyEngine& engine) {
  const ToyState* expected = lineages_[lineage].reference->StateAt(version);
  if (expected == nullptr) {
    return Violation(absl::StrFormat("daemon %d is at version %d, the reference at %d", daemon,
                                     version, lineages_[lineage].reference->next_step()));
  }
  for (std::size_t p = 0; p < expected->size(); ++p) {
    for (std::size_t block = 0; block < (*expected)[p].size(); ++block) {
      if (!engine.Owns(static_cast<int>(p), static_cast<int>(block)) ||
          engine.state()[p][block] == (*expected)[p][block]) {
        continue;
      }
      return Violation(absl::StrFormat(
          "daemon %d: parameter \"%s\": block %d at version %d is not the reference's", daemon,
          scenario_.model.parameters[p].name, block, version));
    }
  }
}

void Checker::OnTold(std::int64_t lineage, const StepOutcome& outcome) {
  const Reference::Consumed* consumed = lineages_[lineage].reference->Of(outcome.step);
  if (consumed == nullptr || consumed->outcome != outcome) {
    Violation(
        absl::StrFormat("a trainer was told an outcome of step %d that is not the "
                        "reference's",
                        outcome.step));
  }
}

}  // namespace muond::simulation
