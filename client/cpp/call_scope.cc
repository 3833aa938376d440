#include "client/cpp/call_scope.h"

#include "absl/time/clock.h"

namespace muond::client {
namespace {

thread_local CallScope* current = nullptr;

}  // namespace

CallScope* CallScope::Current() { return current; }

CallScope::Guard::Guard(CallScope* scope) : outer_(current) { current = scope; }
CallScope::Guard::~Guard() { current = outer_; }

CallScope::Call::Call(grpc::ClientContext& context) : scope_(current), context_(context) {
  if (scope_ == nullptr) return;
  std::lock_guard lock(scope_->mutex_);
  scope_->calls_.insert(&context_);
  // A context that is cancelled before its call begins ends it when it does.
  if (scope_->given_up_) context_.TryCancel();
}

CallScope::Call::~Call() {
  if (scope_ == nullptr) return;
  std::lock_guard lock(scope_->mutex_);
  scope_->calls_.erase(&context_);
}

void CallScope::GiveUp() {
  std::lock_guard lock(mutex_);
  given_up_ = true;
  for (grpc::ClientContext* call : calls_) call->TryCancel();
  changed_.notify_all();
}

bool CallScope::given_up() const {
  std::lock_guard lock(mutex_);
  return given_up_;
}

void CallScope::Sleep(absl::Duration duration) {
  if (current == nullptr) return absl::SleepFor(duration);
  std::unique_lock lock(current->mutex_);
  current->changed_.wait_for(lock, absl::ToChronoNanoseconds(duration),
                             [scope = current] { return scope->given_up_; });
}

}  // namespace muond::client
