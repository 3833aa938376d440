#include "server/rpc/answer.h"

#include <algorithm>

#include "absl/strings/str_format.h"

#include <map>

#include "absl/strings/str_format.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace muond {

v1::RunState ToProto(RunState state) {
  switch (state) {
    case RunState::kOpening:
      return v1::RUN_STATE_OPENING;
    case RunState::kRunning:
    case RunState::kCheckpointing:
      return v1::RUN_STATE_RUNNING;
    case RunState::kDraining:
      return v1::RUN_STATE_DRAINING;
    case RunState::kNeedsRestore:
      return v1::RUN_STATE_NEEDS_RESTORE;
    case RunState::kFailed:
      return v1::RUN_STATE_FAILED;
  }
  return v1::RUN_STATE_UNSPECIFIED;
}

v1::RunPosition ToProto(const RunPosition& position) {
  v1::RunPosition message;
  message.set_generation(position.generation);
  message.set_next_step(position.next_step);
  message.set_state(ToProto(position.state));
  message.set_resume_step(position.resume_step);
  message.set_lineage(position.lineage);
  message.set_promised(position.promised);
  if (position.last_outcome) *message.mutable_last_outcome() = ToProto(*position.last_outcome);
  return message;
}

v1::RoutedParameter ToProto(const RoutedParameter& routed, const std::string& group,
                            const std::string& tied_to, const std::string& owner) {
  v1::RoutedParameter message;
  message.set_name(routed.name);
  message.set_algorithm(ToProto(routed.algorithm));
  message.set_reason(routed.reason);
  message.set_group(group);
  message.set_tied_to(tied_to);
  message.set_owner(owner);
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> views;
  for (const MatrixBlock& block : routed.matrices) ++views[{block.rows, block.cols}];
  for (const auto& [shape, count] : views) {
    v1::RoutedParameter::MatrixView* view = message.add_matrices();
    view->set_rows(shape.first);
    view->set_cols(shape.second);
    view->set_count(count);
  }
  return message;
}

grpc::Status Answer(grpc::CallbackServerContext* context, const absl::Status& status,
                    const Run* run) {
  if (!status.ok() && run != nullptr) AttachPosition(ToProto(run->Position()), context);
  return ToGrpc(status);
}

grpc::ServerUnaryReactor* AnswerNow(grpc::CallbackServerContext* context,
                                    const absl::Status& status, const Run* run) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(Answer(context, status, run));
  return reactor;
}

absl::StatusOr<ChunkMessage> DecodeRequest(const grpc::ByteBuffer& buffer,
                                           std::span<const int> chunk_fields,
                                           google::protobuf::MessageLite* head) {
  auto message = ChunkMessage::Decode(buffer, chunk_fields, head);
  if (message.ok()) return message;
  return absl::InvalidArgumentError(message.status().message());
}

grpc::ByteBuffer ToBuffer(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

absl::Status CheckMember(const Run& run, const char* what, std::int64_t rank,
                         std::int64_t generation) {
  const RunSnapshot snapshot = run.Snapshot();
  const auto& ranks = snapshot.ranks_registered;
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": %s of rank %d: it has not registered", run.name(), what, rank));
  }
  if (generation != snapshot.position.generation) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": %s of rank %d: expected generation %d, got %d", run.name(),
                        what, rank, snapshot.position.generation, generation));
  }
  return absl::OkStatus();
}

}  // namespace muond
