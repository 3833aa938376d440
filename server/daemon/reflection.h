// Whether a gRPC server describes its services to whoever asks (grpc.reflection).
#pragma once

#include "grpcpp/server_builder.h"

namespace muond {

// To be called once for every server. Linking gRPC's reflection library already turns it on for all
// servers of a process, so off must be said, too.
void SetReflection(grpc::ServerBuilder& builder, bool on);

}  // namespace muond
