#include "server/engine/executor.h"

#include <utility>

namespace muond {

Executor::Executor() : thread_([this] { Loop(); }) {}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_all();
  thread_.join();
}

void Executor::Post(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  ready_.notify_one();
}

std::size_t Executor::queued() const {
  std::lock_guard lock(mutex_);
  return jobs_.size();
}

void Executor::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what the job holds is freed outside the lock
    lock.lock();
  }
}

}  // namespace muond
