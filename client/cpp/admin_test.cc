#include "client/cpp/admin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cpp/fake_service.h"
#include "grpcpp/health_check_service_interface.h"

namespace muond::client {
namespace {

TEST(Admin, AsksAndReturnsWhatTheDaemonSays) {
  FakeServer server;
  Admin admin(server.channel(), absl::Seconds(10));
  const auto status = admin.Status("r");
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->runs(0).run(), "r");
  const auto described = admin.DescribeParameters("r", {"a", "b"});
  ASSERT_TRUE(described.ok());
  EXPECT_EQ(described->parameters(1).parameter().name(), "b");
  EXPECT_EQ(admin.Digest("r")->tensor_digest(), "whole");
  EXPECT_EQ(admin.Digest("r", true)->tensor_digest(), "each");
}

TEST(Admin, ReadsTheHealthOfEachService) {
  FakeServer server;
  server.server().GetHealthCheckService()->SetServingStatus("readiness", false);
  Admin admin(server.channel(), absl::Seconds(10));
  EXPECT_EQ(*admin.Health(), "SERVING");
  EXPECT_EQ(*admin.Health("readiness"), "NOT_SERVING");
  EXPECT_EQ(*admin.Health("nonsense"), "SERVICE_UNKNOWN");
}

TEST(Admin, PassesErrorsOn) {
  FakeServer server;
  server.service.failures["Status"].push_back({{grpc::StatusCode::NOT_FOUND, "run \"x\""}, {}});
  Admin admin(server.channel(), absl::Seconds(10));
  EXPECT_TRUE(absl::IsNotFound(admin.Status("x").status()));
}

TEST(Admin, SaysWhenNobodyAnswersOrTheEndpointMakesNoSense) {
  Admin nobody("unix://" + testing::TempDir() + "no-daemon.sock", absl::Seconds(5));
  EXPECT_TRUE(absl::IsUnavailable(nobody.Status().status()));
  EXPECT_TRUE(absl::IsUnavailable(nobody.Health().status()));
  Admin nonsense("nonsense", absl::Seconds(5));
  EXPECT_TRUE(absl::IsInvalidArgument(nonsense.Digest("r").status()));
}

}  // namespace
}  // namespace muond::client
