// Time to wait by: it goes forward only, whatever is done to the machine's clock. absl::Now() is
// for what people read and for certificates; no wait and no deadline may depend on it.
#pragma once

#include "absl/time/time.h"
#include "grpc/support/time.h"

namespace muond {

// Now, as an instant to compare with other instants of this process: CLOCK_MONOTONIC, counted from
// absl::UnixEpoch(), so that one that gets among times of day is at once seen to be none. Any
// thread.
absl::Time SteadyNow();

// The same instant for gRPC: a deadline of a call, an alarm or a shutdown. absl::InfiniteFuture()
// stays infinite, what is before the clock's origin becomes the origin.
gpr_timespec GrpcDeadline(absl::Time steady);

// A call's deadline, `timeout` from now.
inline gpr_timespec GrpcDeadlineIn(absl::Duration timeout) {
  return GrpcDeadline(SteadyNow() + timeout);
}

}  // namespace muond
