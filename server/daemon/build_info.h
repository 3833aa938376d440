// What this binary is.
#pragma once

#include "server/metrics/daemon_metrics.h"

namespace muond {

// Version and revision from the build, compiler, CUDA toolkit ("none" without it).
BuildInfo ThisBuild();

}  // namespace muond
