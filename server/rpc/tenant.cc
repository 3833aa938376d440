#include "server/rpc/tenant.h"

#include "grpc/grpc_security_constants.h"
#include "server/rpc/roles.h"

namespace muond {
namespace {

constexpr std::string_view kTrainerEnding = "/muond/role/trainer";

}  // namespace

std::string TenantOf(const std::vector<std::string>& uris) {
  const std::vector<CallerRole> roles = RolesOf(uris);
  if (roles.size() != 1 || roles[0] != CallerRole::kTrainer) return "";
  // Of several the first by name: a certificate has one place, whatever the order in it.
  std::string tenant;
  for (const std::string& uri : uris) {
    if (!std::string_view(uri).ends_with(kTrainerEnding)) continue;
    if (tenant.empty() || uri < tenant) tenant = uri;
  }
  return tenant;
}

std::string TenantOf(const grpc::CallbackServerContext& context) {
  const auto auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return "";
  std::vector<std::string> uris;
  for (const grpc::string_ref& uri : auth->FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
    uris.emplace_back(uri.data(), uri.size());
  }
  return TenantOf(uris);
}

absl::StatusOr<std::shared_ptr<Run>> FindRun(const grpc::CallbackServerContext& context,
                                             const RunTable& runs, const std::string& name) {
  return runs.Find(name, TenantOf(context));
}

}  // namespace muond
