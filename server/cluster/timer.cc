#include "server/cluster/timer.h"

#include <utility>

#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "proto/grpc_deadline.h"

namespace muond {

Timer::Timer() = default;
Timer::~Timer() = default;

void Timer::Set(absl::Duration delay, std::function<void()> action) {
  // An alarm that goes away is cancelled.
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(GrpcDeadlineIn(delay), [action = std::move(action)](bool fired) {
    if (fired) action();
  });
}

}  // namespace muond
