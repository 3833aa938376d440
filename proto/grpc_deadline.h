// Instants of steady time for gRPC: deadlines of calls, alarms, shutdowns.
#pragma once

#include "absl/time/time.h"
#include "grpc/support/time.h"
#include "proto/steady_time.h"

namespace muond {

// The same instant on gRPC's monotonic clock. absl::InfiniteFuture() stays infinite, what is before
// the clock's origin becomes the origin.
gpr_timespec GrpcDeadline(absl::Time steady);

// `timeout` from now.
inline gpr_timespec GrpcDeadlineIn(absl::Duration timeout) {
  return GrpcDeadline(SteadyNow() + timeout);
}

}  // namespace muond
