// What became of each step on this daemon, for whoever watches: plain values, one event a step.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proto/mutex.h"
#include "proto/values.h"
#include "server/engine/diagnostics.h"

namespace muond {

// A parameter by name; otherwise as Remarkable.
struct NamedValue {
  std::string parameter;
  double value = 0;
};

struct StepEvent {
  std::string run;
  std::string daemon;
  StepOutcome outcome;
  double begin_seconds = 0;  // Unix time of the first Begin; 0: it came without one
  double end_seconds = 0;    // of the outcome
  std::vector<PhaseSpan> phases;
  int scale_change = 0;  // -1 backoff, 1 growth
  bool sampled = false;
  std::vector<NamedValue> worst_residuals, worst_update_ratios, largest_gradients;
  std::int64_t stale_tensors = 0;
  std::map<std::string, double> learning_rates;  // in force, by group
};

// Hands events to listeners and keeps the last one of each run. Thread-safe.
class StepEvents {
 public:
  // Called with the lock held: must be short and must not call back. Null: no more will come.
  using Listener = std::function<void(const std::shared_ptr<const StepEvent>&)>;

  // `run` empty: all runs. The listener is not called any more once Unsubscribe has returned.
  std::uint64_t Subscribe(std::string run, Listener listener);
  void Unsubscribe(std::uint64_t subscription);

  void Publish(StepEvent event);
  // The run is over.
  void Forget(const std::string& run);
  // Tells all listeners, present and future, that no more will come.
  void Close();

  // The last event of the run, or of all runs by name. Lists that only sampled steps have are those
  // of the last sampled step.
  std::vector<StepEvent> Last(const std::string& run) const;

 private:
  struct Subscriber {
    std::string run;
    Listener listener;
  };
  mutable Mutex mutex_;
  std::uint64_t next_ MUOND_GUARDED_BY(mutex_) = 1;
  bool closed_ MUOND_GUARDED_BY(mutex_) = false;
  std::map<std::uint64_t, Subscriber> subscribers_ MUOND_GUARDED_BY(mutex_);
  std::map<std::string, StepEvent> last_ MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
