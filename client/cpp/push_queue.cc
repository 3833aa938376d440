#include "client/cpp/push_queue.h"

#include <utility>

namespace muond::client {
namespace {

absl::Status Cancelled() { return absl::CancelledError("push: cancelled before it began"); }

}  // namespace

absl::Status PushTicket::Wait(absl::Duration timeout) {
  MutexLock lock(mutex_);
  const bool done = ended_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                    [this]() MUOND_REQUIRES(mutex_) { return done_; });
  if (done) return status_;
  return absl::DeadlineExceededError("push: still under way");
}

bool PushTicket::done() const {
  MutexLock lock(mutex_);
  return done_;
}

void PushTicket::End(const absl::Status& status) {
  MutexLock lock(mutex_);
  status_ = status;
  done_ = true;
  ended_.notify_all();
}

PushQueue::~PushQueue() {
  CancelQueued();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<PushTicket> PushQueue::Add(std::span<const SliceSource> sources) {
  auto ticket = std::make_shared<PushTicket>();
  {
    MutexLock lock(mutex_);
    sources_.insert(sources_.end(), sources.begin(), sources.end());
    tickets_.push_back(ticket);
    if (!thread_.joinable()) thread_ = std::thread([this] { Work(); });
  }
  changed_.notify_all();
  return ticket;
}

CallResult PushQueue::Drain() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [this]() MUOND_REQUIRES(mutex_) {
    return tickets_.empty() && !pushing_;
  });
  return failure_;
}

void PushQueue::Forget() {
  MutexLock lock(mutex_);
  failure_ = {};
}

void PushQueue::Cancel() {
  CancelQueued();  // first: the end of the push under way lets the next one begin
  calls_.CancelInner();
}

void PushQueue::CancelQueued() {
  std::vector<std::shared_ptr<PushTicket>> tickets;
  {
    MutexLock lock(mutex_);
    tickets.swap(tickets_);
    sources_.clear();
    if (!tickets.empty() && failure_.status.ok()) failure_.status = Cancelled();
  }
  changed_.notify_all();
  for (const auto& ticket : tickets) ticket->End(Cancelled());
}

void PushQueue::Work() {
  MutexLock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this]() MUOND_REQUIRES(mutex_) {
      return stopping_ || !tickets_.empty();
    });
    if (stopping_) return;
    const std::vector<SliceSource> sources = std::exchange(sources_, {});
    const std::vector<std::shared_ptr<PushTicket>> tickets = std::exchange(tickets_, {});
    pushing_ = true;
    CallResult result;
    {
      const Operation operation(calls_);  // under the lock: Cancel finds it, or what is queued
      lock.unlock();
      result = push_(sources);
    }
    for (const auto& ticket : tickets) ticket->End(result.status);
    lock.lock();
    if (!result.status.ok() && failure_.status.ok()) failure_ = result;
    pushing_ = false;
    changed_.notify_all();
  }
}

}  // namespace muond::client
