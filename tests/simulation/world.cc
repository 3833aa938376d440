#include "tests/simulation/world.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_format.h"

namespace muond::simulation {

World::World(const Scenario& scenario, bool verbose)
    : scenario_(scenario),
      verbose_(verbose),
      random_(Hash(scenario.seed, 1)),
      cut_until_(nodes(), std::vector<Time>(nodes(), 0)),
      paused_until_(nodes(), 0) {}

bool World::Later(const Event& a, const Event& b) {
  return a.at != b.at ? a.at > b.at : a.order > b.order;
}

void World::After(Time delay, std::function<void()> action) {
  heap_.push_back({now_ + delay, order_++, std::move(action)});
  std::push_heap(heap_.begin(), heap_.end(), Later);
}

bool World::Step() {
  if (heap_.empty()) return false;
  std::pop_heap(heap_.begin(), heap_.end(), Later);
  Event event = std::move(heap_.back());
  heap_.pop_back();
  now_ = event.at;
  ++events_;
  event.action();
  return true;
}

void World::Cut(std::uint64_t one, std::uint64_t other, bool both_ways, Time until) {
  for (int from = 0; from < nodes(); ++from) {
    for (int to = 0; to < nodes(); ++to) {
      const bool forth = (one >> from & 1) != 0 && (other >> to & 1) != 0;
      const bool back = both_ways && (other >> from & 1) != 0 && (one >> to & 1) != 0;
      if (forth || back) cut_until_[from][to] = std::max(cut_until_[from][to], until);
    }
  }
}

void World::Pause(int node, Time until) {
  paused_until_[node] = std::max(paused_until_[node], until);
}

Time World::Delay(int from, int to) {
  const Faults& faults = scenario_.faults;
  if (!healed() && random_.Chance(faults.slow)) return random_.Between(1'000, faults.slowest);
  const double speed = std::max(faults.speeds[from], faults.speeds[to]);
  return static_cast<Time>(static_cast<double>(random_.Between(200, 2'000)) * speed);
}

void World::Send(Message message) {
  const Faults& faults = scenario_.faults;
  if (message.from == message.to) return Deliver(message, 1);
  const bool drop = !healed() && random_.Chance(faults.drop);
  if (drop || cut_until_[message.from][message.to] > now_) {
    if (verbose_) Log("lost " + ToString(message));
    return;
  }
  if (!healed() && random_.Chance(faults.duplicate)) {
    Deliver(message, Delay(message.from, message.to));
  }
  Deliver(message, Delay(message.from, message.to));
}

void World::Deliver(const Message& message, Time delay) {
  After(delay, [this, message] {
    if (const Time until = paused_until_[message.to]; until > now_) {
      return Deliver(message, until - now_);
    }
    if (verbose_) Log(ToString(message));
    receiver_(Message(message));
  });
}

void World::Log(const std::string& line) const {
  if (verbose_) std::printf("%8.3f ms  %s\n", static_cast<double>(now_) / 1000, line.c_str());
}

}  // namespace muond::simulation
