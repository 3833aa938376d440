#include "server/rpc/roles.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace muond {
namespace {

using Roles = unsigned;
constexpr Roles Bit(CallerRole role) { return 1U << static_cast<unsigned>(role); }
constexpr Roles kTrainer = Bit(CallerRole::kTrainer);
constexpr Roles kDaemon = Bit(CallerRole::kDaemon);
constexpr Roles kAdmin = Bit(CallerRole::kAdmin);
constexpr Roles kAny = kTrainer | kDaemon | kAdmin;

constexpr CallerRole kAllRoles[] = {CallerRole::kTrainer, CallerRole::kDaemon, CallerRole::kAdmin};

struct Row {
  std::string_view method;  // one that ends in "/" is a whole service
  Roles roles;
};

// Changing a run is its trainers' business, deciding its steps the daemons'; an operator looks, and
// ends what hangs. A trainer may look, too: that is how it learns that Muon is really on.
constexpr Row kTable[] = {
    {"/muond.v1.Optimizer/Register", kTrainer},
    {"/muond.v1.Optimizer/Initialize", kTrainer},
    {"/muond.v1.Optimizer/Begin", kTrainer},
    {"/muond.v1.Optimizer/Push", kTrainer},
    {"/muond.v1.Optimizer/Finish", kTrainer},
    {"/muond.v1.Optimizer/Skip", kTrainer},
    {"/muond.v1.Optimizer/Pull", kTrainer},
    {"/muond.v1.Optimizer/AddParameters", kTrainer},
    {"/muond.v1.Optimizer/Close", kTrainer | kAdmin},
    {"/muond.v1.Optimizer/RaiseGeneration", kTrainer | kAdmin},
    {"/muond.v1.Optimizer/OpenArena", kTrainer},
    {"/muond.v1.Optimizer/CloseArena", kTrainer},
    {"/muond.v1.Optimizer/PullArena", kTrainer},
    {"/muond.v1.Optimizer/Exchange", kTrainer},
    {"/muond.v1.Optimizer/OpenPair", kTrainer},
    {"/muond.v1.Optimizer/ClosePair", kTrainer},
    {"/muond.v1.Optimizer/Status", kAny},
    {"/muond.v1.Optimizer/DescribeParameters", kTrainer | kAdmin},
    {"/muond.v1.Optimizer/Digest", kTrainer | kAdmin},
    {"/muond.v1.Admin/", kAdmin},
    {"/muond.v1.Checkpoint/", kAny},
    {"/muond.v1.CheckpointPeer/", kDaemon},
    {"/muond.v1.Peer/", kDaemon},
    {"/grpc.health.v1.Health/", kAny},
    {"/grpc.reflection.v1alpha.ServerReflection/", kAdmin},
    {"/grpc.reflection.v1.ServerReflection/", kAdmin},
};

const Row* FindRow(std::string_view method) {
  const auto* row = std::find_if(std::begin(kTable), std::end(kTable), [&](const Row& candidate) {
    return candidate.method.ends_with('/') ? method.starts_with(candidate.method)
                                           : method == candidate.method;
  });
  return row == std::end(kTable) ? nullptr : row;
}

std::string Names(Roles roles) {
  std::string names;
  for (const CallerRole role : kAllRoles) {
    if ((roles & Bit(role)) == 0) continue;
    absl::StrAppend(&names, names.empty() ? "" : " or ", std::string(CallerRoleName(role)));
  }
  return names.empty() ? "none" : names;
}

}  // namespace

std::string_view CallerRoleName(CallerRole role) {
  switch (role) {
    case CallerRole::kTrainer:
      return "trainer";
    case CallerRole::kDaemon:
      return "daemon";
    case CallerRole::kAdmin:
      return "admin";
  }
  return "";
}

std::vector<CallerRole> RolesOf(const std::vector<std::string>& uris) {
  std::vector<CallerRole> roles;
  for (const CallerRole role : kAllRoles) {
    const std::string ending = "/muond/role/" + std::string(CallerRoleName(role));
    const bool given = std::any_of(uris.begin(), uris.end(), [&](const std::string& uri) {
      return std::string_view(uri).ends_with(ending);
    });
    if (given) roles.push_back(role);
  }
  return roles;
}

absl::Status CheckRole(std::string_view method, const std::vector<CallerRole>& roles,
                       std::string_view holder) {
  Roles held = 0;
  for (const CallerRole role : roles) held |= Bit(role);
  const Row* row = FindRow(method);
  const Roles needed = row == nullptr ? 0 : row->roles;
  if ((held & needed) != 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrFormat("call \"%s\": needs the role %s, certificate \"%s\" gives %s",
                      std::string(method), Names(needed), std::string(holder), Names(held)));
}

bool HasRoleRow(std::string_view method) { return FindRow(method) != nullptr; }

}  // namespace muond
