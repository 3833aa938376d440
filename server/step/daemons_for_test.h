// Several MachineDrivers as the daemons of one run, and trainers that say the same to each. Nothing
// passes between the daemons unless a test hands it on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {

// `whole` as each of the daemons sees it, by `owner` of each parameter.
inline std::vector<StepLayout> Spread(const StepLayout& whole, int daemons,
                                      const std::vector<int>& owner) {
  std::vector<StepLayout> layouts(daemons, whole);
  for (int daemon = 0; daemon < daemons; ++daemon) {
    StepLayout& layout = layouts[daemon];
    layout.self = daemon;
    layout.daemons.clear();
    for (int d = 0; d < daemons; ++d) layout.daemons.push_back("d" + std::to_string(d));
    for (std::size_t p = 0; p < owner.size(); ++p) {
      if (owner[p] != daemon) layout.parameters[p].here = StepLayout::Here::kNone;
    }
  }
  return layouts;
}

// Parameter "pD" of one slice on each rank for each daemon D.
inline std::vector<StepLayout> OneEach(int daemons, std::int64_t world_size) {
  StepLayout whole{world_size, {}};
  std::vector<int> owner;
  for (int d = 0; d < daemons; ++d) {
    whole.parameters.push_back(
        Sliced("p" + std::to_string(d), d, std::vector<std::int64_t>(world_size, 1)));
    owner.push_back(d);
  }
  return Spread(whole, daemons, owner);
}

class Daemons {
 public:
  explicit Daemons(const std::vector<StepLayout>& layouts, const RunSpec& spec = Spec()) {
    for (const StepLayout& layout : layouts) drivers_.emplace_back(layout, spec);
  }
  MachineDriver& operator[](int daemon) { return drivers_[daemon]; }
  int count() const { return static_cast<int>(drivers_.size()); }
  std::int64_t world_size() const { return drivers_[0].layout.world_size; }

  // Begins, pushes and finishes the step on one daemon, or on all; returns the waiters by rank.
  std::vector<std::uint64_t> Finish(int daemon, const std::vector<std::string>& absent = {}) {
    MachineDriver& d = drivers_[daemon];
    d.BeginAll();
    for (std::int64_t rank = 0; rank < world_size(); ++rank) {
      for (const SliceId& id : d.SlicesOf(rank)) {
        const std::string& name = d.layout.parameters[id.parameter].name;
        if (std::find(absent.begin(), absent.end(), name) != absent.end()) continue;
        const auto arrival = d.Push(id);
        EXPECT_TRUE(arrival.ok()) << arrival.status();
      }
    }
    const std::int64_t step = d.machine.next_step();
    std::vector<std::uint64_t> waiters;
    for (std::int64_t rank = 0; rank < world_size(); ++rank) {
      waiters.push_back(d.FinishAt(step, rank, absent));
    }
    return waiters;
  }
  std::vector<std::vector<std::uint64_t>> FinishAll(const std::vector<std::string>& absent = {}) {
    std::vector<std::vector<std::uint64_t>> waiters;
    for (int daemon = 0; daemon < count(); ++daemon) waiters.push_back(Finish(daemon, absent));
    return waiters;
  }

  // The newest vote of a daemon, as it is told.
  CastVote NewestVote(int daemon) const {
    if (!drivers_[daemon].votes.empty()) return {daemon, drivers_[daemon].votes.back()};
    ADD_FAILURE() << "daemon " << daemon << " has not voted";
    return {daemon, {}};
  }
  absl::Status Tell(int from, int to) { return drivers_[to].Vote(NewestVote(from)); }
  // Every vote to everybody.
  void TellAll() {
    std::vector<CastVote> votes;
    for (int daemon = 0; daemon < count(); ++daemon) votes.push_back(NewestVote(daemon));
    for (MachineDriver& driver : drivers_) {
      for (const CastVote& cast : votes) {
        const absl::Status status = driver.Vote(cast);
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }

  // The first round of raising the generation, on all.
  std::vector<StepMachine::Promise> PrepareAll(std::int64_t generation) {
    std::vector<StepMachine::Promise> promises;
    for (MachineDriver& driver : drivers_) {
      const auto promise = driver.machine.OnPrepare(generation);
      EXPECT_TRUE(promise.ok()) << promise.status();
      promises.push_back(promise.ok() ? *promise : StepMachine::Promise{});
    }
    return promises;
  }

 private:
  std::deque<MachineDriver> drivers_;
};

}  // namespace muond
