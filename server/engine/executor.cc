#include "server/engine/executor.h"

#include <utility>

#include "proto/long_turns.h"

namespace muond {

Executor::Executor() : thread_([this] { Loop(); }) {}

Executor::~Executor() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_all();
  thread_.join();
}

void Executor::Post(std::function<void()> job) {
  {
    MutexLock lock(mutex_);
    jobs_.push_back(std::move(job));
    ++posted_;
  }
  ready_.notify_one();
}

void Executor::PostIdle(std::function<void()> job) {
  {
    MutexLock lock(mutex_);
    idle_jobs_.push_back(std::move(job));
    ++posted_;
  }
  ready_.notify_one();
}

std::size_t Executor::queued() const {
  MutexLock lock(mutex_);
  return jobs_.size() + idle_jobs_.size();
}

std::uint64_t Executor::posted() const {
  MutexLock lock(mutex_);
  return posted_;
}

void Executor::WaitIdle() const {
  MutexLock lock(mutex_);
  idle_.wait(lock, [this]() MUOND_REQUIRES(mutex_) {
    return jobs_.empty() && idle_jobs_.empty() && !running_;
  });
}

void Executor::Loop() {
  const LongTurns turns;  // what it computes is never small
  MutexLock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this]() MUOND_REQUIRES(mutex_) {
      return stopping_ || !jobs_.empty() || !idle_jobs_.empty();
    });
    auto& from = jobs_.empty() ? idle_jobs_ : jobs_;
    if (from.empty()) return;
    std::function<void()> job = std::move(from.front());
    from.pop_front();
    running_ = true;
    lock.unlock();
    job();
    job = nullptr;  // what the job holds is freed outside the lock
    lock.lock();
    running_ = false;
    if (jobs_.empty() && idle_jobs_.empty()) idle_.notify_all();
  }
}

void StopAll(std::vector<std::unique_ptr<Executor>>& executors) {
  const auto posted = [&] {
    std::uint64_t sum = 0;
    for (const auto& executor : executors) sum += executor->posted();
    return sum;
  };
  // A round in which nobody posted, and each was idle at some moment, leaves nobody who could post.
  for (std::uint64_t before = posted() + 1; before != posted();) {
    before = posted();
    for (const auto& executor : executors) executor->WaitIdle();
  }
  executors.clear();
}

}  // namespace muond
