// Ends the calls of a session from another thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>

#include "absl/time/time.h"
#include "grpcpp/client_context.h"

namespace muond::client {

// Thread-safe.
class Canceller {
 public:
  // Cancels all calls that are registered; each Cancel begins a new epoch.
  void Cancel() {
    std::lock_guard lock(mutex_);
    ++epoch_;
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
    cancelled_.notify_all();
  }
  // Ends early when the epoch is over; false then.
  bool Sleep(absl::Duration duration, std::int64_t epoch) {
    std::unique_lock lock(mutex_);
    return !cancelled_.wait_for(lock, absl::ToChronoNanoseconds(duration),
                                [&] { return epoch_ != epoch; });
  }
  std::int64_t epoch() const {
    std::lock_guard lock(mutex_);
    return epoch_;
  }

 private:
  friend class CancelScope;
  mutable std::mutex mutex_;
  std::condition_variable cancelled_;
  std::int64_t epoch_ = 0;
  std::set<grpc::ClientContext*> contexts_;
};

// One call: it can be cancelled while the scope lives, and is at once when its epoch is over.
class CancelScope {
 public:
  // `canceller` may be null.
  CancelScope(Canceller* canceller, std::int64_t epoch, grpc::ClientContext* context)
      : canceller_(canceller), context_(context) {
    if (canceller_ == nullptr) return;
    std::lock_guard lock(canceller_->mutex_);
    canceller_->contexts_.insert(context_);
    if (canceller_->epoch_ != epoch) context_->TryCancel();
  }
  ~CancelScope() {
    if (canceller_ == nullptr) return;
    std::lock_guard lock(canceller_->mutex_);
    canceller_->contexts_.erase(context_);
  }
  CancelScope(const CancelScope&) = delete;
  CancelScope& operator=(const CancelScope&) = delete;

 private:
  Canceller* const canceller_;
  grpc::ClientContext* const context_;
};

}  // namespace muond::client
