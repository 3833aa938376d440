// Calls that stand or fall together, in scopes inside scopes: a session, in it each of its methods
// that is under way, in that the calls to several daemons. Once one daemon's answer has decided,
// those that still wait for others are given up at once; Session::Cancel ends whatever is under
// way.
#pragma once

#include <memory>
#include <set>

#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "proto/mutex.h"

namespace muond::client {

// Thread-safe. A scope outlives those inside it.
class CallScope {
 public:
  // Inside `outer`, and over from the beginning when that is; null: in none.
  explicit CallScope(CallScope* outer);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  // The scope that the calls of this thread belong to; null: none, nobody gives them up.
  static CallScope* Current();

  // Makes a scope this thread's for as long as the guard lives.
  class Guard {
   public:
    explicit Guard(CallScope* scope);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    CallScope* const outer_;
  };

  // A call under way: in the current scope while this lives. The context outlives it.
  class Call {
   public:
    explicit Call(grpc::ClientContext& context);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    CallScope* const scope_;
    grpc::ClientContext& context_;
  };

  // Ends what is under way in here; what begins from now on ends at once, with CANCELLED.
  void GiveUp();
  // Gives up all scopes that are inside this one, on the caller's word; this one goes on.
  void CancelInner();

  bool over() const;       // given up, by whichever of the two
  bool cancelled() const;  // by CancelInner
  // Whether the scope of this thread is; false without one.
  static bool CurrentIsOver() { return Current() != nullptr && Current()->over(); }
  // Ends early when the current scope is over.
  static void Sleep(absl::Duration duration);

 private:
  enum class State { kOpen, kGivenUp, kCancelled };
  // One lock for a scope and all inside it, which the analysis can't know of two scopes: where one
  // reaches into another that other's is asserted.
  struct Tree {
    Mutex mutex;
    CondVar changed;
  };
  void End(State state) MUOND_REQUIRES(tree_->mutex);

  CallScope* const outer_;
  const std::shared_ptr<Tree> tree_;
  State state_ MUOND_GUARDED_BY(tree_->mutex) = State::kOpen;
  std::set<CallScope*> inner_ MUOND_GUARDED_BY(tree_->mutex);
  std::set<grpc::ClientContext*> calls_ MUOND_GUARDED_BY(tree_->mutex);
};

// A method of whoever owns `owner`: a scope of its own inside it, this thread's until the end;
// within another such method the one that is there.
class Operation {
 public:
  explicit Operation(CallScope& owner)
      : scope_(CallScope::Current() != nullptr ? CallScope::Current() : &owner), guard_(&scope_) {}

 private:
  CallScope scope_;
  const CallScope::Guard guard_;
};

}  // namespace muond::client
