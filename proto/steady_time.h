// Time to wait by: it goes forward only, whatever is done to the machine's clock. absl::Now() is
// for what people read and for certificates; no wait and no deadline may depend on it.
#pragma once

#include "absl/time/time.h"

namespace muond {

// Now, as an instant to compare with other instants of this process: CLOCK_MONOTONIC, counted from
// absl::UnixEpoch(), so that one that gets among times of day is at once seen to be none. Any
// thread.
absl::Time SteadyNow();

}  // namespace muond
