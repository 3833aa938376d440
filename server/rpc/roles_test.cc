#include "server/rpc/roles.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muond/v1/admin.pb.h"
#include "muond/v1/checkpoint.pb.h"
#include "muond/v1/optimizer.pb.h"
#include "muond/v1/peer.pb.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Who may call it, as text.
std::string Allowed(const std::string& method) {
  std::string names;
  for (const CallerRole role :
       {CallerRole::kTrainer, CallerRole::kDaemon, CallerRole::kAdmin}) {
    if (!CheckRole(method, {role}, "CN=x").ok()) continue;
    names += std::string(CallerRoleName(role)) + " ";
  }
  return names;
}

TEST(Roles, ComeFromUrisOfAnyTrustDomain) {
  EXPECT_THAT(RolesOf({"spiffe://example.org/muond/role/trainer"}),
              ElementsAre(CallerRole::kTrainer));
  EXPECT_THAT(RolesOf({"urn:other", "https://a/muond/role/admin", "x://b/muond/role/daemon"}),
              ElementsAre(CallerRole::kDaemon, CallerRole::kAdmin));
  EXPECT_THAT(RolesOf({"spiffe://example.org/muond/role/trainer2", "spiffe://a/role/admin",
                       "spiffe://a/muond/role/", "trainer"}),
              IsEmpty());
}

TEST(Roles, TrainersTrainDaemonsVoteAdminsLook) {
  for (const char* verb : {"Register", "Initialize", "Begin", "Push", "Finish", "Skip", "Pull"}) {
    EXPECT_EQ(Allowed(std::string("/muond.v1.Optimizer/") + verb), "trainer ") << verb;
  }
  for (const char* verb : {"Close", "RaiseGeneration", "DescribeParameters", "Digest"}) {
    EXPECT_EQ(Allowed(std::string("/muond.v1.Optimizer/") + verb), "trainer admin ") << verb;
  }
  EXPECT_EQ(Allowed("/muond.v1.Optimizer/Status"), "trainer daemon admin ");
  EXPECT_EQ(Allowed("/muond.v1.Peer/Vote"), "daemon ");
  EXPECT_EQ(Allowed("/muond.v1.CheckpointPeer/Stage"), "daemon ");
  EXPECT_EQ(Allowed("/muond.v1.Checkpoint/Save"), "trainer daemon admin ");
  EXPECT_EQ(Allowed("/muond.v1.Admin/Drain"), "admin ");
  EXPECT_EQ(Allowed("/grpc.health.v1.Health/Check"), "trainer daemon admin ");
  EXPECT_EQ(Allowed("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"), "admin ");
}

TEST(Roles, ARefusalSaysWhatIsNeededAndWhatIsHeld) {
  const absl::Status status =
      CheckRole("/muond.v1.Optimizer/Push", {CallerRole::kDaemon, CallerRole::kAdmin}, "CN=node 3");
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(status.message(),
            "call \"/muond.v1.Optimizer/Push\": needs the role trainer, certificate \"CN=node 3\" "
            "gives daemon or admin");
  EXPECT_THAT(std::string(CheckRole("/muond.v1.Optimizer/Status", {}, "CN=x").message()),
              HasSubstr("gives none"));
}

TEST(Roles, AMethodWithoutARowIsNobodys) {
  EXPECT_EQ(Allowed("/muond.v1.Optimizer/Pus"), "");
  EXPECT_EQ(Allowed("/muond.v1.Optimizer/Push2"), "");
  EXPECT_EQ(Allowed("/other.Service/Call"), "");
  EXPECT_EQ(Allowed(""), "");
}

TEST(Roles, NoVerbOfOursWasForgotten) {
  for (const google::protobuf::FileDescriptor* file :
       {v1::RegisterRequest::descriptor()->file(), v1::HelloRequest::descriptor()->file(),
        v1::WatchRequest::descriptor()->file(), v1::SaveRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const std::string method =
            "/" + file->service(s)->full_name() + "/" + file->service(s)->method(m)->name();
        EXPECT_TRUE(HasRoleRow(method)) << method << ": give it a row in server/rpc/roles.cc";
      }
    }
  }
}

}  // namespace
}  // namespace muond
