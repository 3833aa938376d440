// The one thread that touches a device. Jobs run in the order they were posted, so whoever posts
// in the right order needs no other lock on optimizer state.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  mutable std::condition_variable idle_;
  std::deque<std::function<void()>> jobs_, idle_jobs_;
  std::uint64_t posted_ = 0;
  bool running_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// Ends all of them. Jobs of one may post to another: none goes before all have nothing to do.
void StopAll(std::vector<std::unique_ptr<Executor>>& executors);

}  // namespace muond
