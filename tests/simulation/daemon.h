// One simulated daemon: a StepMachine, the driver around it and a toy engine. Does what server/run
// and server/cluster do, with timers and messages of the simulated world.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "server/step/step_machine.h"
#include "tests/simulation/bugs.h"
#include "tests/simulation/checker.h"
#include "tests/simulation/messages.h"
#include "tests/simulation/raiser.h"
#include "tests/simulation/toy_engine.h"
#include "tests/simulation/world.h"

namespace muond::simulation {

class Daemon {
 public:
  Daemon(int id, World& world, Checker& checker, Bug bug);

  void Receive(const Message& message);
  // State and everything in memory is lost; the disk keeps generation and promise.
  void Crash();
  void Restart();
  bool up() const { return up_; }
  bool usable() const { return machine_ != nullptr && !machine_->failed(); }
  std::int64_t generation() const { return disk_.generation; }

 private:
  using Job = std::variant<ReduceEffect, CommitEffect>;
  struct Disk {
    std::int64_t generation = 1;
    std::int64_t promised = 1;
    std::int64_t proposed = 1;
  };
  struct Waiter {
    int trainer;
    std::uint64_t call;
  };
  // The step whose votes are told again and again.
  struct Telling {
    std::int64_t generation, step;
    Time pause;
    std::vector<Time> heard;  // by peer: its last sign of life
  };

  // daemon.cc
  void Later(Time delay, std::function<void()> action);
  Position Where() const;
  void Reply(const Message& call, Answer answer);
  void ReplyStatus(const Message& call, const absl::Status& status);
  void StartLineage(std::int64_t lineage, std::int64_t step);
  // As Run::Adopt: the late parameters are there from now on.
  void Grow();
  StepLayout Layout() const;
  // The end of a commit is awaited before they are: nobody is let in meanwhile.
  bool Closed(const Message& message);
  // Has the machine take an event and carries out what follows.
  void Feed(const std::function<void(Effects&)>& event);
  void Carry(const Effects& effects, std::int64_t generation);
  void Discarded(const Effects& effects, const DiscardEffect& effect, std::int64_t generation);
  void Consumed(const OutcomeEffect& effect, std::int64_t generation);
  void Answered(const ReplyEffect& effect);
  void Check();

  // daemon_calls.cc
  void On(const Message& message, const BeginCall& call);
  void On(const Message& message, const PushCall& call);
  void On(const Message& message, const FinishCall& call);
  void On(const Message& message, const SkipCall& call);
  void On(const Message& message, const CancelCall& call);
  void On(const Message& message, const JoinCall& call);
  void On(const Message& message, const NewGenerationCall& call);
  void On(const Message& message, const VotesCall& call);
  void On(const Message& message, const PrepareCall& call);
  void On(const Message& message, const RaiseCall& call);
  void On(const Message& message, const Answer& answer);
  std::int64_t Generation(std::int64_t told) const;
  void ClosePush(const Message& message, const PushCall& call, StepMachine::Admission admission,
                 std::int64_t attempt);
  void Wait(const Message& message, std::uint64_t waiter);
  void Hear(std::vector<CastVote> votes);
  void Tell();
  void WatchPromise();

  // daemon_engine.cc
  void RunNextJob();
  void Run(const ReduceEffect& reduce);
  void Run(const CommitEffect& commit);
  bool EngineFails();

  const int id_;
  World& world_;
  Checker& checker_;
  const Bug bug_;
  Disk disk_;
  bool up_ = true;
  std::int64_t life_ = 0;  // a crash ends one
  std::unique_ptr<Raiser> raiser_;
  std::vector<Message> raise_calls_;  // to be answered when the raiser is done

  // In memory.
  bool grown_ = false, grow_after_commit_ = false;
  std::int64_t lineage_ = 0;
  std::int64_t epoch_ = 0;  // of machine and engine: tells the answers of an earlier engine
  std::unique_ptr<StepMachine> machine_;
  std::unique_ptr<ToyEngine> engine_;
  std::deque<Job> jobs_;
  bool engine_busy_ = false;
  bool commit_open_ = false;  // asked for, not yet answered
  bool applied_ = false;      // of the open commit: state has changed
  std::uint64_t waiters_made_ = 0;
  std::map<std::uint64_t, Waiter> waiters_;
  std::optional<Telling> telling_;
  std::uint64_t calls_ = 0;
};

}  // namespace muond::simulation
