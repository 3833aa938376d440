// The one thread that touches a device. Jobs run in the order they were posted, so whoever posts
// in the right order needs no other lock on optimizer state.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "proto/mutex.h"

namespace muond {

class Executor {
 public:
  Executor();
  // Runs what is queued, then joins.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Any thread. A job must not wait for a later job.
  void Post(std::function<void()> job);
  // To be run when nothing else is queued: in the order in which such jobs were posted, behind
  // every other job, those included that are posted later.
  void PostIdle(std::function<void()> job);
  std::size_t queued() const;
  // Jobs posted since the beginning.
  std::uint64_t posted() const;
  // Returns at a moment at which nothing is queued and nothing runs. Not from a job.
  void WaitIdle() const;

 private:
  void Loop();
  mutable Mutex mutex_;
  CondVar ready_;
  mutable CondVar idle_;
  std::deque<std::function<void()>> jobs_ MUOND_GUARDED_BY(mutex_);
  std::deque<std::function<void()>> idle_jobs_ MUOND_GUARDED_BY(mutex_);
  std::uint64_t posted_ MUOND_GUARDED_BY(mutex_) = 0;
  bool running_ MUOND_GUARDED_BY(mutex_) = false;
  bool stopping_ MUOND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Ends all of them. Jobs of one may post to another: none goes before all have nothing to do.
void StopAll(std::vector<std::unique_ptr<Executor>>& executors);

}  // namespace muond
