// How Engines asks several devices at once and puts their answers together: for engines*.cc only.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "server/engine/engines.h"

namespace muond {

// The first that is not OK, in the order of the devices.
inline absl::Status First(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status First(const std::vector<absl::StatusOr<T>>& results) {
  for (const auto& result : results) {
    if (!result.ok()) return result.status();
  }
  return absl::OkStatus();
}

inline void Merge(const StateHealth& part, StateHealth& whole) {
  for (const auto& [name, group] : part.groups) {
    StateHealth::Group& sum = whole.groups[name];
    sum.muon_sum_squares += group.muon_sum_squares;
    sum.momentum_sum_squares += group.momentum_sum_squares;
    sum.weight_sum_squares += group.weight_sum_squares;
  }
  whole.nonfinite_momentum += part.nonfinite_momentum;
  whole.nonfinite_second_moment += part.nonfinite_second_moment;
  whole.nonfinite_weight += part.nonfinite_weight;
}

// Calls `done` with the results in the order of `units`, on the thread of the last.
template <typename Result>
void Engines::PostTo(const std::vector<Unit*>& units, std::function<Result(Engine&)> work,
                     std::function<void(std::vector<Result>)> done) {
  struct State {
    std::function<Result(Engine&)> work;
    std::function<void(std::vector<Result>)> done;
    std::vector<Result> results;
    std::atomic<int> open;
  };
  auto state = std::make_shared<State>();
  state->work = std::move(work);
  state->done = std::move(done);
  state->results.resize(units.size());
  state->open = static_cast<int>(units.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    Post(*units[i], [state, i](Engine& engine) {
      state->results[i] = state->work(engine);
      if (--state->open == 0) state->done(std::move(state->results));
    });
  }
}

}  // namespace muond
