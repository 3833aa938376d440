// Sees everything that happens in a simulation and knows what must not.
//
//   - Nothing changes before a verdict, and a skipped step leaves the state as it was.
//   - A verdict needs the vote of every daemon, cast in that generation for that step.
//   - A step is applied at most once, and every version equals the reference's.
//   - All daemons reach one verdict, coefficient, next loss scale and outcome: the reference's.
//   - No daemon throws away a step that another one consumes.
//   - A promise is kept: no vote in a generation below it.
//   - Each waiter is answered once; each answer about a step is the same.
//
// The first violation ends the simulation.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/step/step_machine.h"
#include "tests/simulation/reference.h"
#include "tests/simulation/scenario.h"
#include "tests/simulation/toy_engine.h"

namespace muond::simulation {

// What has happened, over all scenarios: what a run did not come across it did not test.
struct Coverage {
  std::int64_t applied = 0, skipped = 0;  // steps, once for each daemon
  std::int64_t generations = 0;           // raised, once for each daemon
  std::int64_t settled = 0;               // steps consumed by settled votes
  std::int64_t raised_during_commit = 0;
  std::int64_t reinitializations = 0;  // once for each daemon
  std::int64_t grown = 0;              // late parameters taken on, once for each daemon
  std::int64_t grown_after_commit = 0;  // of these, after the commit that the order came in
  std::int64_t followed = 0;            // of these, since another daemon had them
  std::int64_t taken_up = 0;           // promises, by a daemon that had given them
  std::int64_t discarded_votes = 0;    // steps thrown away after this daemon had voted
  std::int64_t early_votes = 0;        // for the next step
  std::int64_t refused_votes = 0;      // of another generation, or after a promise
  std::int64_t stale_pushes = 0;       // of another generation, step or attempt
  std::int64_t deadlines = 0, unreachable = 0, cancelled = 0, disagreements = 0;
  std::int64_t new_gradients = 0;  // pushed by a rank that had lost its first ones
  std::int64_t daemon_crashes = 0, trainer_crashes = 0, engine_failures = 0;

  void Add(const Coverage& other);
  std::string ToString() const;
  // The names of what never happened.
  std::vector<std::string> Missing() const;
};

class Checker {
 public:
  explicit Checker(const Scenario& scenario) : scenario_(scenario) {}

  // A rank starts to push these gradients for the step in this generation.
  void OnUse(std::int64_t rank, std::int64_t generation, std::int64_t step, const Content& content);
  // A daemon has state at `first_step`, in a lineage that is new to it.
  void OnLineage(int daemon, std::int64_t lineage, std::int64_t first_step);
  void OnPromise(int daemon, std::int64_t generation);
  // A daemon with state has come to this generation, with the late parameters or without.
  void OnRaised(int daemon, std::int64_t generation, bool grown);
  void OnVote(int daemon, std::int64_t lineage, const Vote& vote);
  // A daemon threw away the step in flight, unconsumed.
  void OnDiscard(int daemon, std::int64_t lineage, std::int64_t generation, std::int64_t step);
  // A verdict fell on a daemon whose generation was `generation`.
  void OnCommit(int daemon, std::int64_t lineage, std::int64_t generation,
                const CommitEffect& commit);
  void OnOutcome(int daemon, std::int64_t lineage, std::int64_t generation,
                 const StepOutcome& outcome);
  // `version`: steps whose effects the state must show.
  void OnState(int daemon, std::int64_t lineage, std::int64_t version, const ToyEngine& engine);
  // A trainer was told the outcome.
  void OnTold(std::int64_t lineage, const StepOutcome& outcome);
  void Violation(const std::string& what);

  const std::string& violation() const { return violation_; }
  Coverage coverage;

 private:
  // The votes of one step in one generation.
  struct Ballot {
    std::map<int, std::int64_t> cast;  // by daemon: its lineage
    std::set<int> withdrawn;
    std::vector<std::optional<Content>> contents;  // by rank
  };
  struct Lineage {
    std::int64_t first_step = 0;
    std::unique_ptr<Reference> reference;
    std::map<std::int64_t, std::int64_t> verdicts;  // by step: the generation that it fell in
    std::map<std::pair<int, std::int64_t>, std::int64_t> commits;  // by daemon and step
  };
  Ballot& BallotOf(std::int64_t generation, std::int64_t step);
  // The reference's word on a step on which `daemon` has a verdict; nullptr after a violation.
  const Reference::Consumed* Verdict(int daemon, std::int64_t lineage, std::int64_t generation,
                                     std::int64_t step);

  const Scenario& scenario_;
  std::map<std::int64_t, Lineage> lineages_;
  std::map<std::pair<std::int64_t, std::int64_t>, Ballot> ballots_;  // by generation and step
  std::map<int, std::int64_t> promises_;
  std::map<std::int64_t, std::pair<int, bool>> grown_;  // by generation: who came first, and how
  std::string violation_;
};

}  // namespace muond::simulation
