#include "proto/steady_time.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/grpc_deadline.h"

namespace muond {
namespace {

// What gRPC makes of a deadline is compared with its own clock.
absl::Duration FromNow(gpr_timespec deadline) {
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
  return absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

TEST(SteadyTime, GoesForward) {
  const absl::Time before = SteadyNow();
  absl::SleepFor(absl::Milliseconds(2));
  EXPECT_GE(SteadyNow() - before, absl::Milliseconds(2));
}

TEST(GrpcDeadline, IsTheSameInstant) {
  const absl::Duration left = FromNow(GrpcDeadlineIn(absl::Seconds(100)));
  EXPECT_GT(left, absl::Seconds(90));
  EXPECT_LE(left, absl::Seconds(100));
}

TEST(GrpcDeadline, NeedsNoWallClock) {
  EXPECT_EQ(GrpcDeadline(SteadyNow()).clock_type, GPR_CLOCK_MONOTONIC);
}

TEST(GrpcDeadline, InfinityStaysAndThePastIsPast) {
  EXPECT_EQ(gpr_time_cmp(GrpcDeadline(absl::InfiniteFuture()),
                         gpr_inf_future(GPR_CLOCK_MONOTONIC)), 0);
  EXPECT_LT(FromNow(GrpcDeadline(absl::InfinitePast())), absl::ZeroDuration());
}

TEST(SteadyTime, IsNoTimeOfDay) {
  EXPECT_GT(absl::Now() - SteadyNow(), absl::Hours(24 * 365));
}

}  // namespace
}  // namespace muond
