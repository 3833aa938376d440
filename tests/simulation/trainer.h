// One simulated trainer rank. Follows the client's protocol: begins, pushes and finishes each step
// on every daemon, repeats what stays unanswered, and finds its place again after whatever happens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/simulation/bugs.h"
#include "tests/simulation/checker.h"
#include "tests/simulation/messages.h"
#include "tests/simulation/world.h"

namespace muond::simulation {

class Trainer {
 public:
  Trainer(std::int64_t rank, World& world, Checker& checker, Bug bug);

  void Receive(const Message& message);
  void Crash();
  void Restart() { Join(); }
  bool up() const { return up_; }
  // All steps are consumed.
  bool done() const { return up_ && step_ >= world_.scenario().steps; }
  std::int64_t step() const { return step_; }

 private:
  enum class Phase : std::uint8_t { kJoining, kRaising, kComputing, kStepping, kDone };
  // How far the step is on one daemon.
  struct Link {
    bool begun = false;
    bool done = false;
    bool finishing = false;  // a Finish or Skip is on its way
    std::set<SliceId> unpushed;
    int refusals = 0;
  };
  struct Call {
    int daemon;
    Body body;
    std::int64_t round;  // of joining or stepping, to which it belongs
  };

  // trainer.cc: where the rank stands.
  void Later(Time delay, std::function<void()> action);
  std::uint64_t Send(int daemon, Body body, Time timeout);
  void OnTimeout(std::uint64_t number);
  void NextRound(Phase phase);
  void Join();
  void JoinAgain();
  void OnJoined();
  void TakePlace(std::int64_t lowest, const Position& at);
  void AskForGeneration(bool reinitialize);

  // trainer_step.cc: one step.
  void Compute();
  void StartStep(const std::vector<std::int64_t>& next_steps);
  void StartLink(int daemon);
  void PushAll(int daemon);
  void Finish(int daemon);
  Body Truth(int daemon) const;
  Body MaybeLie(int daemon, Body body);
  void OnStepAnswer(const Call& call, const Answer& answer);
  void OnAccepted(const Call& call, const Answer& answer);
  void OnRefused(const Call& call, const Answer& answer);
  void Repeat(const Call& call);
  void EndLink(int daemon, const StepOutcome& outcome);

  const std::int64_t rank_;
  World& world_;
  Checker& checker_;
  const Bug bug_;
  const int daemons_;

  bool up_ = true;
  std::int64_t life_ = 0;
  Phase phase_ = Phase::kJoining;
  std::int64_t round_ = 0;
  std::uint64_t calls_ = 0;
  std::map<std::uint64_t, Call> open_;

  std::vector<std::optional<Position>> joined_;  // by daemon
  int mismatches_ = 0;  // joins in a row after which the rank could not go on
  int timeouts_ = 0;    // in this round of stepping

  std::int64_t lineage_ = 0;
  std::int64_t generation_ = 0;
  std::int64_t step_ = 0;
  double loss_scale_ = 1;
  bool grown_ = false;  // the daemons have the late parameters
  Content content_;
  // Gradients are gone since then: new ones may be pushed above the generation, once it is known.
  bool lost_ = false;
  std::optional<std::int64_t> lost_in_;
  std::vector<Link> links_;                               // by daemon
  std::set<std::pair<std::int64_t, std::int64_t>> lied_;  // generation and step
};

}  // namespace muond::simulation
