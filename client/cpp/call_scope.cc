#include "client/cpp/call_scope.h"

#include "absl/time/clock.h"

namespace muond::client {
namespace {

thread_local CallScope* current = nullptr;

}  // namespace

CallScope::CallScope(CallScope* outer)
    : outer_(outer), tree_(outer == nullptr ? std::make_shared<Tree>() : outer->tree_) {
  if (outer_ == nullptr) return;
  MutexLock lock(tree_->mutex);
  outer_->inner_.insert(this);
  state_ = outer_->state_;
}

CallScope::~CallScope() {
  if (outer_ == nullptr) return;
  MutexLock lock(tree_->mutex);
  outer_->inner_.erase(this);
}

CallScope* CallScope::Current() { return current; }

CallScope::Guard::Guard(CallScope* scope) : outer_(current) { current = scope; }
CallScope::Guard::~Guard() { current = outer_; }

CallScope::Call::Call(grpc::ClientContext& context) : scope_(current), context_(context) {
  if (scope_ == nullptr) return;
  MutexLock lock(scope_->tree_->mutex);
  scope_->calls_.insert(&context_);
  // A context that is cancelled before its call begins ends it when it does.
  if (scope_->state_ != State::kOpen) context_.TryCancel();
}

CallScope::Call::~Call() {
  if (scope_ == nullptr) return;
  MutexLock lock(scope_->tree_->mutex);
  scope_->calls_.erase(&context_);
}

void CallScope::End(State state) {
  if (state_ != State::kCancelled) state_ = state;
  for (grpc::ClientContext* call : calls_) call->TryCancel();
  for (CallScope* inner : inner_) {
    inner->tree_->mutex.AssertHeld();
    inner->End(state);
  }
}

void CallScope::GiveUp() {
  MutexLock lock(tree_->mutex);
  End(State::kGivenUp);
  tree_->changed.notify_all();
}

void CallScope::CancelInner() {
  MutexLock lock(tree_->mutex);
  for (CallScope* inner : inner_) {
    inner->tree_->mutex.AssertHeld();
    inner->End(State::kCancelled);
  }
  tree_->changed.notify_all();
}

bool CallScope::over() const {
  MutexLock lock(tree_->mutex);
  return state_ != State::kOpen;
}

bool CallScope::cancelled() const {
  MutexLock lock(tree_->mutex);
  return state_ == State::kCancelled;
}

void CallScope::Sleep(absl::Duration duration) {
  CallScope* const scope = current;
  if (scope == nullptr) return absl::SleepFor(duration);
  MutexLock lock(scope->tree_->mutex);
  scope->tree_->changed.wait_for(
      lock, absl::ToChronoNanoseconds(duration),
      [scope]() MUOND_REQUIRES(scope->tree_->mutex) { return scope->state_ != State::kOpen; });
}

}  // namespace muond::client
