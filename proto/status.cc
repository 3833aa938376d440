#include "proto/status.h"

#include <string>

#include "absl/strings/string_view.h"

namespace muond {
namespace {

// The two enumerations have one origin and are cast into each other; that is proven here.
#define MUOND_SAME_CODE(absl_code, grpc_code)                      \
  static_assert(static_cast<int>(absl::StatusCode::absl_code) ==   \
                    static_cast<int>(grpc::StatusCode::grpc_code), \
                "absl and gRPC disagree about " #grpc_code)
MUOND_SAME_CODE(kOk, OK);
MUOND_SAME_CODE(kCancelled, CANCELLED);
MUOND_SAME_CODE(kUnknown, UNKNOWN);
MUOND_SAME_CODE(kInvalidArgument, INVALID_ARGUMENT);
MUOND_SAME_CODE(kDeadlineExceeded, DEADLINE_EXCEEDED);
MUOND_SAME_CODE(kNotFound, NOT_FOUND);
MUOND_SAME_CODE(kAlreadyExists, ALREADY_EXISTS);
MUOND_SAME_CODE(kPermissionDenied, PERMISSION_DENIED);
MUOND_SAME_CODE(kResourceExhausted, RESOURCE_EXHAUSTED);
MUOND_SAME_CODE(kFailedPrecondition, FAILED_PRECONDITION);
MUOND_SAME_CODE(kAborted, ABORTED);
MUOND_SAME_CODE(kOutOfRange, OUT_OF_RANGE);
MUOND_SAME_CODE(kUnimplemented, UNIMPLEMENTED);
MUOND_SAME_CODE(kInternal, INTERNAL);
MUOND_SAME_CODE(kUnavailable, UNAVAILABLE);
MUOND_SAME_CODE(kDataLoss, DATA_LOSS);
MUOND_SAME_CODE(kUnauthenticated, UNAUTHENTICATED);
#undef MUOND_SAME_CODE

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message().data(), status.message().size());
  if (message.size() > kStatusMessageBytesMax) {
    message.resize(kStatusMessageBytesMax - 3);
    message += "...";
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

void AttachPosition(const v1::RunPosition& position, grpc::ServerContextBase* context) {
  context->AddTrailingMetadata(kPositionKey, position.SerializeAsString());
}

std::optional<v1::RunPosition> PositionFrom(const grpc::ClientContext& context) {
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto found = metadata.find(kPositionKey);
  if (found == metadata.end()) return std::nullopt;
  v1::RunPosition position;
  if (!position.ParseFromArray(found->second.data(), static_cast<int>(found->second.size()))) {
    return std::nullopt;
  }
  return position;
}

}  // namespace muond
