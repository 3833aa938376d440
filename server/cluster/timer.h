// Calls somebody once, later, on one of gRPC's threads. Thread-safe.
#pragma once

#include <functional>
#include <memory>

#include "absl/time/time.h"

namespace grpc {
class Alarm;
}

namespace muond {

class Timer {
 public:
  Timer();
  // What was set and did not go off never will.
  ~Timer();

  // Replaces what was set before.
  void Set(absl::Duration delay, std::function<void()> action);

 private:
  std::unique_ptr<grpc::Alarm> alarm_;
};

}  // namespace muond
