#include "server/run/step_events.h"

#include <utility>

namespace muond {

std::uint64_t StepEvents::Subscribe(std::string run, Listener listener) {
  MutexLock lock(mutex_);
  if (closed_) {
    listener(nullptr);
    return 0;
  }
  subscribers_[next_] = {std::move(run), std::move(listener)};
  return next_++;
}

void StepEvents::Unsubscribe(std::uint64_t subscription) {
  MutexLock lock(mutex_);
  subscribers_.erase(subscription);
}

void StepEvents::Publish(StepEvent event) {
  auto shared = std::make_shared<const StepEvent>(std::move(event));
  MutexLock lock(mutex_);
  for (const auto& [id, subscriber] : subscribers_) {
    if (subscriber.run.empty() || subscriber.run == shared->run) subscriber.listener(shared);
  }
  StepEvent kept = *shared;
  if (const auto found = last_.find(kept.run); found != last_.end()) {
    StepEvent& before = found->second;
    if (kept.worst_residuals.empty()) kept.worst_residuals = std::move(before.worst_residuals);
    if (kept.largest_gradients.empty()) {
      kept.largest_gradients = std::move(before.largest_gradients);
    }
    // Without a sample the list lacks AdamW's parameters.
    if (!kept.sampled && !before.worst_update_ratios.empty()) {
      kept.worst_update_ratios = std::move(before.worst_update_ratios);
    }
  }
  last_[kept.run] = std::move(kept);
}

void StepEvents::Forget(const std::string& run) {
  MutexLock lock(mutex_);
  last_.erase(run);
}

void StepEvents::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  for (const auto& [id, subscriber] : subscribers_) subscriber.listener(nullptr);
  subscribers_.clear();
}

std::vector<StepEvent> StepEvents::Last(const std::string& run) const {
  MutexLock lock(mutex_);
  std::vector<StepEvent> events;
  for (const auto& [name, event] : last_) {
    if (run.empty() || run == name) events.push_back(event);
  }
  return events;
}

}  // namespace muond
