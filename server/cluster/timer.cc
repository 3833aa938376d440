#include "server/cluster/timer.h"

#include <utility>

#include "absl/time/clock.h"
#include "grpcpp/alarm.h"

namespace muond {

Timer::Timer() = default;
Timer::~Timer() = default;

void Timer::Set(absl::Duration delay, std::function<void()> action) {
  // An alarm that goes away is cancelled.
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(absl::ToChronoTime(absl::Now() + delay), [action = std::move(action)](bool fired) {
    if (fired) action();
  });
}

}  // namespace muond
