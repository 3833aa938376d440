// Twenty steps over a data path, which must end alike over every one.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "client/cpp/admin.h"
#include "client/cpp/session.h"
#include "gtest/gtest.h"
#include "tests/conformance/transport_paths.h"
#include "tests/support/service_fixture.h"

namespace muond::conformance {

inline std::string DigestOf(Service& service) {
  client::Admin admin(service.channel(), absl::Seconds(30));
  return cluster::Must(admin.Digest("run")).tensor_digest();
}

// Twenty steps, one of them skipped; what the trainer gets back of each, and the digest.
struct Trained {
  std::string digest;
  std::vector<std::vector<std::string>> parameters;
  friend bool operator==(const Trained&, const Trained&) = default;
};

// `Trainer`: one rank with session(), spec(), Initialize(), Sources(), Sinks() and pulled().
template <typename Trainer>
Trained TwentySteps(PathDaemon& daemon, Trainer& trainer, bool one_call) {
  trainer.Initialize();
  Trained result;
  for (int step = 0; step < 20; ++step) {
    cluster::Tensors gradients = cluster::NoiseFor(trainer.spec(), 100 + step);
    if (step == 7) gradients.at("w.odd")[11] = std::numeric_limits<float>::infinity();
    auto sinks = trainer.Sinks();
    const auto sources = trainer.Sources(gradients);
    StepOutcome outcome;
    if (one_call) {
      outcome = cluster::Must(trainer.session().StepAndPull({}, sources, sinks));
    } else {
      outcome = cluster::Must(trainer.session().Step({}, sources));
      cluster::Must(trainer.session().Pull(outcome.version, sinks));
    }
    EXPECT_EQ(outcome.applied, step != 7);
    result.parameters.push_back(trainer.pulled());
  }
  result.digest = DigestOf(daemon.service());
  return result;
}

}  // namespace muond::conformance
