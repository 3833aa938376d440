// What a TCP port is opened with: mutual TLS, each call held against the caller's role.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "proto/tls.h"

namespace muond {

// Credentials that ask every caller for a certificate of the authority, watch the files for new
// ones, and answer PERMISSION_DENIED to calls that server/rpc/roles.h gives to others. Plain ones
// for empty `files`. Errors as CheckTlsFiles, and FAILED_PRECONDITION for a certificate without the
// role daemon: no other daemon would believe it.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsFiles& files);

}  // namespace muond
