#include "server/rpc/tenant.h"

#include <gtest/gtest.h>

namespace muond {
namespace {

TEST(Tenant, IsTheTrainersRoleUri) {
  EXPECT_EQ(TenantOf({"urn:x", "spiffe://d/a/muond/role/trainer"}),
            "spiffe://d/a/muond/role/trainer");
  EXPECT_EQ(TenantOf({"spiffe://d/b/muond/role/trainer", "spiffe://d/a/muond/role/trainer"}),
            "spiffe://d/a/muond/role/trainer")
      << "whatever the order";
}

TEST(Tenant, OperatorsAndDaemonsHaveNone) {
  EXPECT_EQ(TenantOf({"spiffe://d/a/muond/role/admin"}), "");
  EXPECT_EQ(TenantOf({"spiffe://d/a/muond/role/daemon"}), "");
  EXPECT_EQ(TenantOf({"spiffe://d/a/muond/role/trainer", "spiffe://d/muond/role/admin"}), "");
  EXPECT_EQ(TenantOf(std::vector<std::string>{}), "");
}

}  // namespace
}  // namespace muond
