// The one thread that touches a backend. Jobs run in the order they were posted, so whoever posts
// in the right order needs no other lock on optimizer state.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

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
  std::size_t queued() const;

 private:
  void Loop();
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace muond
