// Slices on their way in the background: what is queued while a push runs goes together in the next
// one.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/call_scope.h"
#include "client/cpp/retry.h"
#include "client/cpp/session.h"
#include "proto/mutex.h"

namespace muond::client {

// Thread-safe; one thread of its own, from the first slice on.
class PushQueue {
 public:
  using Push = std::function<CallResult(std::span<const SliceSource>)>;
  // Each push is an Operation of `calls`, which outlives the queue.
  PushQueue(CallScope& calls, Push push) : calls_(calls), push_(std::move(push)) {}
  // Waits for the push that is under way; what is queued gets CANCELLED.
  ~PushQueue();

  std::shared_ptr<PushTicket> Add(std::span<const SliceSource> sources);
  // Waits until nothing is queued or under way. The first failure since the last call of Forget.
  CallResult Drain();
  // A new step: earlier failures are history.
  void Forget();
  // What has not begun gets CANCELLED, and so does every operation of `calls` that is under way.
  void Cancel();

 private:
  void Work();
  void CancelQueued();

  CallScope& calls_;
  const Push push_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<SliceSource> sources_ MUOND_GUARDED_BY(mutex_);  // queued
  std::vector<std::shared_ptr<PushTicket>> tickets_ MUOND_GUARDED_BY(mutex_);
  bool pushing_ MUOND_GUARDED_BY(mutex_) = false;
  bool stopping_ MUOND_GUARDED_BY(mutex_) = false;
  CallResult failure_ MUOND_GUARDED_BY(mutex_);  // the first
  std::thread thread_;
};

}  // namespace muond::client
