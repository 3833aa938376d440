// Which trainers a run belongs to, where they have certificates.
//
// The tenant of a call is the trainer's role URI of its certificate: all whose URI is the same
// share their runs, "spiffe://muond.internal/team-a/muond/role/trainer" and
// ".../team-b/muond/role/trainer" can't touch each other's. A run belongs to the tenant whose
// Register came first (RunTable).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/run/run_table.h"

namespace muond {

// Of a certificate with these URIs. Empty, which may touch every run: it is an operator's or a
// daemon's too, whose calls roles.h limits, or gives no trainer's role.
std::string TenantOf(const std::vector<std::string>& uris);

// Of the connection that the call came by. Empty without certificates: a unix socket's folder or
// the network (--insecure) is the guard then.
std::string TenantOf(const grpc::CallbackServerContext& context);

// NOT_FOUND when there is no run of that name, PERMISSION_DENIED when it is another tenant's.
absl::StatusOr<std::shared_ptr<Run>> FindRun(const grpc::CallbackServerContext& context,
                                             const RunTable& runs, const std::string& name);

}  // namespace muond
