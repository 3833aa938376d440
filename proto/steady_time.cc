#include "proto/steady_time.h"

#include <chrono>

namespace muond {

absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace muond
