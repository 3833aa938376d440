// What all handlers share: the run's position in messages, and refusals that carry it.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.pb.h"
#include "proto/chunk_message.h"
#include "server/run/run.h"

namespace muond {

v1::RunPosition ToProto(const RunPosition& position);
v1::RunState ToProto(RunState state);
v1::RoutedParameter ToProto(const RoutedParameter& routed, const std::string& group,
                            const std::string& tied_to, const std::string& owner);

// The status for the wire. A refusal of a call on a known run gets the run's position attached, so
// that a trainer whose reply was lost learns where the run stands; `run` may be null.
grpc::Status Answer(grpc::CallbackServerContext* context, const absl::Status& status,
                    const Run* run);

// The reactor of a unary call that is answered at once.
grpc::ServerUnaryReactor* AnswerNow(grpc::CallbackServerContext* context,
                                    const absl::Status& status, const Run* run);

// OK iff the rank has registered and knows the generation; else FAILED_PRECONDITION. `what` it asks
// for: "arena".
absl::Status CheckMember(const Run& run, const char* what, std::int64_t rank,
                         std::int64_t generation);

// A request that came as a raw buffer: its chunks, and all else in `head`. INVALID_ARGUMENT when it
// is no such message.
absl::StatusOr<ChunkMessage> DecodeRequest(const grpc::ByteBuffer& buffer,
                                           std::span<const int> chunk_fields,
                                           google::protobuf::MessageLite* head);
grpc::ByteBuffer ToBuffer(const google::protobuf::MessageLite& message);

}  // namespace muond
