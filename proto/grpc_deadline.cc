#include "proto/grpc_deadline.h"

#include <algorithm>
#include <cstdint>

namespace muond {

gpr_timespec GrpcDeadline(absl::Time steady) {
  if (steady == absl::InfiniteFuture()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const timespec time = absl::ToTimespec(std::max(steady, absl::UnixEpoch()));
  return {time.tv_sec, static_cast<std::int32_t>(time.tv_nsec), GPR_CLOCK_MONOTONIC};
}

}  // namespace muond
