// Who may call what: a table of verbs, and the roles that a certificate gives its holder.
//
// A role is a URI among the certificate's subject alternative names that ends in
// "/muond/role/<role>", whatever stands before: "spiffe://example.org/muond/role/trainer". Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace muond {

enum class CallerRole : std::uint8_t {
  kTrainer,  // takes part in runs
  kDaemon,   // votes with the others of a run
  kAdmin,    // looks at runs, raises generations, closes
};

std::string_view CallerRoleName(CallerRole role);

// The roles of a certificate with these URIs; others mean nothing here.
std::vector<CallerRole> RolesOf(const std::vector<std::string>& uris);

// PERMISSION_DENIED unless one of `roles` may call `method` ("/muond.v1.Optimizer/Push"); a method
// without a row is nobody's. `holder` is whom the message names: the certificate's subject.
absl::Status CheckRole(std::string_view method, const std::vector<CallerRole>& roles,
                       std::string_view holder);

// Whether the table has a row for it. For the test that no verb was forgotten.
bool HasRoleRow(std::string_view method);

}  // namespace muond
