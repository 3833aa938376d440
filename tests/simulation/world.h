// Simulated time, the network between the nodes, and the log. Single-threaded: events happen one
// after the other, in an order that the seed decides.
//
// Nodes: daemons 0 .. D-1, then trainers D .. D+N-1.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/simulation/messages.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scenario.h"

namespace muond::simulation {

class World {
 public:
  World(const Scenario& scenario, bool verbose);

  Time now() const { return now_; }
  Random& random() { return random_; }
  const Scenario& scenario() const { return scenario_; }
  bool healed() const { return now_ >= scenario_.faults.heals; }
  int nodes() const { return scenario_.model.daemons + scenario_.model.world_size; }
  int trainer(std::int64_t rank) const { return scenario_.model.daemons + static_cast<int>(rank); }

  // Whoever gets the messages that arrive at a node.
  void SetReceiver(std::function<void(Message&&)> receiver) { receiver_ = std::move(receiver); }

  void After(Time delay, std::function<void()> action);
  // Lost, doubled, late or in another order, as the faults and partitions say.
  void Send(Message message);
  // Nothing passes between the two sides (nodes by bit) until then. One way: nothing from `one`.
  void Cut(std::uint64_t one, std::uint64_t other, bool both_ways, Time until);
  // The node hangs: what arrives and its own timers wait until then.
  void Pause(int node, Time until);
  Time paused_until(int node) const { return paused_until_[node]; }

  // Carries out the next event. False: there is none.
  bool Step();
  std::int64_t events() const { return events_; }

  bool verbose() const { return verbose_; }
  void Log(const std::string& line) const;

 private:
  struct Event {
    Time at;
    std::uint64_t order;  // of two at one time, the one that was planned first
    std::function<void()> action;
  };
  static bool Later(const Event& a, const Event& b);
  void Deliver(const Message& message, Time delay);
  Time Delay(int from, int to);

  const Scenario& scenario_;
  const bool verbose_;
  Random random_;
  Time now_ = 0;
  std::uint64_t order_ = 0;
  std::int64_t events_ = 0;
  std::vector<Event> heap_;
  std::vector<std::vector<Time>> cut_until_;  // by sender and receiver
  std::vector<Time> paused_until_;
  std::function<void(Message&&)> receiver_;
};

}  // namespace muond::simulation
