// absl::Status <-> grpc::Status, converted once each way at the wire, and the run's position that
// refusals carry along.
#pragma once

#include <cstddef>
#include <optional>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.pb.h"

namespace muond {

// Longer messages are cut: gRPC refuses trailing metadata beyond 8 KiB, and the code would be lost
// with it.
inline constexpr std::size_t kStatusMessageBytesMax = 4096;

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// Trailing metadata key under which refusals carry a serialized RunPosition.
inline constexpr char kPositionKey[] = "muond-position-bin";

void AttachPosition(const v1::RunPosition& position, grpc::ServerContextBase* context);
// Empty when the server sent none or an unreadable one.
std::optional<v1::RunPosition> PositionFrom(const grpc::ClientContext& context);

}  // namespace muond
