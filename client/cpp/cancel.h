// Ends the calls of a session from another thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>

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
  }
  std::int64_t epoch() const {
    std::lock_guard lock(mutex_);
    return epoch_;
  }

 private:
  friend class CancelScope;
  mutable std::mutex mutex_;
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
