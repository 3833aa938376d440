// The embedded service against the same service behind sockets: same inputs, same digest.
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "client/examples/embedded/trainer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/embedded.h"

namespace muond::embedded_example {
namespace {

std::unique_ptr<Service> Start(ServiceOptions options) {
  options.threads = 1;
  auto service = Service::Start(options);
  EXPECT_TRUE(service.ok()) << service.status();
  return service.ok() ? *std::move(service) : nullptr;
}

absl::StatusOr<Training> TrainEmbedded(const std::string& backend) {
  const auto service = Start({.backend = backend});
  if (service == nullptr) return absl::UnavailableError("no service");
  client::SessionOptions options;
  options.channel = service->channel();
  return Train(options);
}

absl::StatusOr<Training> TrainThrough(const std::string& address) {
  const auto service = Start({.listen = {address}});
  if (service == nullptr) return absl::UnavailableError("no service");
  client::SessionOptions options;
  options.endpoint = service->addresses().at(0);
  return Train(options);
}

TEST(Embedded, StepsSkipsAndGoesOn) {
  const auto training = TrainEmbedded("cpu");
  ASSERT_TRUE(training.ok()) << training.status();
  ASSERT_EQ(training->outcomes.size(), 4u);
  const bool applied[] = {true, true, false, true};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(training->outcomes[i].applied, applied[i]) << i;
  EXPECT_EQ(training->outcomes[2].cause, SkipCause::kOverflow);
  EXPECT_EQ(training->outcomes[2].next_loss_scale, 512);
  EXPECT_EQ(training->outcomes[3].applied_steps, 3);
  // Three steps of a diagonal gradient with equal magnitudes: every O is diag(1, -1) x 1.1081112.
  float first = 1, second = 1;
  for (int i = 0; i < 3; ++i) {
    first = 0.99f * first - 0.11081112f;
    second = 0.99f * second + 0.11081112f;
  }
  EXPECT_NEAR(training->weights[0], first, 1e-5);
  EXPECT_NEAR(training->weights[3], second, 1e-5);
}

TEST(Embedded, GivesTheDigestThatSocketsGive) {
  const auto embedded = TrainEmbedded("cpu");
  ASSERT_TRUE(embedded.ok()) << embedded.status();
  EXPECT_EQ(embedded->digest.size(), 32u);
  const std::string socket = absl::StrFormat("unix:/tmp/muond-embedded-%d.sock", getpid());
  for (const std::string& address : {socket, std::string("127.0.0.1:0")}) {
    const auto remote = TrainThrough(address);
    ASSERT_TRUE(remote.ok()) << remote.status();
    EXPECT_EQ(remote->digest, embedded->digest) << address;
    EXPECT_EQ(remote->outcomes, embedded->outcomes) << address;
    EXPECT_EQ(remote->weights, embedded->weights) << address;
  }
}

TEST(Embedded, TakesTheReferenceBackend) {
  const auto cpu = TrainEmbedded("cpu");
  const auto reference = TrainEmbedded("reference");
  ASSERT_TRUE(cpu.ok() && reference.ok()) << cpu.status() << reference.status();
  EXPECT_THAT(reference->weights, testing::Pointwise(testing::FloatNear(1e-5f), cpu->weights));
}

}  // namespace
}  // namespace muond::embedded_example
