#include "tests/simulation/simulation.h"

#include <algorithm>
#include <deque>
#include <functional>

#include "absl/strings/str_format.h"
#include "tests/simulation/daemon.h"
#include "tests/simulation/trainer.h"
#include "tests/simulation/world.h"

namespace muond::simulation {
namespace {

constexpr Time kSecond = 1'000'000;
// Once nothing goes wrong any more: time for the last re-initialization, and for each step.
constexpr Time kRecovery = 20 * kSecond;
constexpr Time kStepTime = 4 * kSecond;
constexpr std::int64_t kEventsMost = 3'000'000;

class Simulation {
 public:
  Simulation(const Scenario& scenario, Bug bug, bool verbose)
      : scenario_(scenario), checker_(scenario), world_(scenario, verbose) {
    for (int d = 0; d < scenario.model.daemons; ++d) {
      daemons_.emplace_back(d, world_, checker_, bug);
    }
    for (int rank = 0; rank < scenario.model.world_size; ++rank) {
      trainers_.emplace_back(rank, world_, checker_, bug);
    }
    world_.SetReceiver([this](Message&& message) { Receive(message); });
    PlanFaults();
  }

  Result Run() {
    const Time deadline = scenario_.faults.heals + kRecovery + scenario_.steps * kStepTime;
    while (checker_.violation().empty() && !Done()) {
      if (!world_.Step()) {
        checker_.Violation("nothing happens any more, and not all steps are consumed");
      } else if (world_.now() > deadline || world_.events() > kEventsMost) {
        checker_.Violation(
            absl::StrFormat("not all steps are consumed %.1f s after the network healed",
                            static_cast<double>(world_.now() - scenario_.faults.heals) / kSecond));
      }
    }
    return {checker_.violation(), world_.events(), world_.now(),
            Hash(hash_, world_.now(), world_.events()), checker_.coverage};
  }

 private:
  bool Done() const {
    return std::all_of(trainers_.begin(), trainers_.end(),
                       [](const Trainer& trainer) { return trainer.done(); });
  }

  void Receive(const Message& message) {
    hash_ = Hash(hash_, world_.now(), message.from, message.to, message.call, message.body.index());
    const int rank = message.to - scenario_.model.daemons;
    if (rank >= 0) {
      if (trainers_[rank].up()) trainers_[rank].Receive(message);
      return;
    }
    if (daemons_[message.to].up()) return daemons_[message.to].Receive(message);
    // Nobody listens there: mostly that is told at once.
    if (std::holds_alternative<Answer>(message.body) || world_.random().Chance(0.3)) return;
    Answer refused;
    refused.status = absl::UnavailableError("connection refused");
    world_.Send({message.to, message.from, message.call, std::move(refused)});
  }

  // Does something again and again, `rate` times a second, until the network heals.
  void Recur(double rate, const std::function<void()>& what) {
    if (rate == 0) return;
    const auto most = static_cast<Time>(2 * kSecond / rate);
    world_.After(world_.random().Between(1, most), [this, rate, what] {
      if (world_.healed()) return;
      what();
      Recur(rate, what);
    });
  }

  void PlanFaults() {
    const Faults& faults = scenario_.faults;
    Recur(faults.partitions, [this] { Partition(); });
    Recur(faults.pauses, [this] {
      const int node = static_cast<int>(world_.random().Below(world_.nodes()));
      const Time until = Until(1'500'000);
      world_.Log(
          absl::StrFormat("node %d hangs until %.3f ms", node, static_cast<double>(until) / 1000));
      world_.Pause(node, until);
    });
    Recur(faults.trainer_crashes, [this] { CrashTrainer(); });
    Recur(faults.daemon_crashes, [this] { CrashDaemon(); });
    Recur(faults.raises, [this] {
      const bool any = scenario_.any_daemon_raises;
      const int d = any ? static_cast<int>(world_.random().Below(scenario_.model.daemons)) : 0;
      if (!daemons_[d].up()) return;
      // From an operator, who does not mind the answer.
      world_.Send({world_.trainer(0), d, 0, NewGenerationCall{daemons_[d].generation(), false, 0}});
    });
  }

  // Some time from now, but not after everything has healed.
  Time Until(Time longest) {
    return std::min(world_.now() + world_.random().Between(1'000, longest), scenario_.faults.heals);
  }

  void Partition() {
    const std::uint64_t all = (std::uint64_t{1} << world_.nodes()) - 1;
    std::uint64_t one = world_.random().Next() & all;
    // Often one node only.
    if (world_.random().Chance(0.5))
      one = std::uint64_t{1} << world_.random().Below(world_.nodes());
    const bool both_ways = world_.random().Chance(0.7);
    const Time until = Until(1'500'000);
    world_.Log(absl::StrFormat("partition %x from the others%s until %.3f ms", one,
                               both_ways ? "" : ", one way", static_cast<double>(until) / 1000));
    world_.Cut(one, all & ~one, both_ways, until);
  }

  void CrashTrainer() {
    Trainer& trainer = trainers_[world_.random().Below(std::ssize(trainers_))];
    if (!trainer.up()) return;
    world_.Log("a trainer crashes");
    ++checker_.coverage.trainer_crashes;
    trainer.Crash();
    world_.After(Until(500'000) - world_.now(), [&trainer] { trainer.Restart(); });
  }

  void CrashDaemon() {
    const auto d = static_cast<int>(world_.random().Below(std::ssize(daemons_)));
    Daemon& daemon = daemons_[d];
    if (!daemon.up()) return;
    world_.Log(absl::StrFormat("daemon %d crashes", d));
    ++checker_.coverage.daemon_crashes;
    daemon.Crash();
    world_.After(Until(800'000) - world_.now(), [this, &daemon, d] {
      world_.Log(absl::StrFormat("daemon %d is back, without state", d));
      daemon.Restart();
    });
  }

  const Scenario& scenario_;
  Checker checker_;
  World world_;
  std::deque<Daemon> daemons_;
  std::deque<Trainer> trainers_;
  std::uint64_t hash_ = 0;
};

}  // namespace

Result Simulate(std::uint64_t seed, const Options& options) {
  Scenario scenario = MakeScenario(seed);
  if (options.restless) {
    scenario.any_daemon_raises = true;
    scenario.faults.raises = 20;
    scenario.faults.daemon_crashes = 2;
    scenario.faults.slow = 0.2;
    scenario.faults.slowest = 100'000;
    scenario.faults.drop = 0.2;
  }
  return Simulation(scenario, options.bug, options.verbose).Run();
}

}  // namespace muond::simulation
