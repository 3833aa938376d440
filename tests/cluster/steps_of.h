// How many steps were applied to a parameter, whichever daemon of a cluster owns it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "tests/support/cluster_fixture.h"

namespace muond::cluster {

// The most that any daemon tells: those that don't own it tell 0.
inline std::int64_t StepsOf(Cluster& cluster, const std::string& parameter) {
  std::int64_t steps = 0;
  for (int daemon = 0; daemon < cluster.count(); ++daemon) {
    client::Admin admin(cluster.channel(daemon), absl::Seconds(30));
    const auto described = Must(admin.DescribeParameters("run", {parameter}));
    steps = std::max<std::int64_t>(steps, described.parameters(0).t());
  }
  return steps;
}

}  // namespace muond::cluster
