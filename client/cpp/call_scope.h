// Calls that stand or fall together: once one daemon's answer has decided, those that still wait
// for others are given up at once. Thread-safe.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>

#include "absl/time/time.h"
#include "grpcpp/client_context.h"

namespace muond::client {

class CallScope {
 public:
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

  // Cancels what is under way; what begins from now on ends at once, with CANCELLED.
  void GiveUp();
  bool given_up() const;
  // Ends early when the current scope is given up.
  static void Sleep(absl::Duration duration);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool given_up_ = false;
  std::set<grpc::ClientContext*> calls_;
};

}  // namespace muond::client
