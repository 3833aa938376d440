// The gRPC face of checkpoints, to operators and trainers and to the other daemons; one file per
// verb.
#pragma once

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/checkpoint.grpc.pb.h"
#include "server/run/checkpointer.h"

namespace muond {

class CheckpointService final : public v1::Checkpoint::CallbackService {
 public:
  // `checkpointer` null: the daemon has no checkpoint directory, and every call says so.
  CheckpointService(RunTable* runs, Checkpointer* checkpointer)
      : runs_(runs), checkpointer_(checkpointer) {}
  grpc::ServerUnaryReactor* Save(grpc::CallbackServerContext*, const v1::SaveRequest*,
                                 v1::SaveReply*) override;
  grpc::ServerUnaryReactor* Restore(grpc::CallbackServerContext*, const v1::RestoreRequest*,
                                    v1::RestoreReply*) override;

 private:
  // FAILED_PRECONDITION without the directory that the call needs.
  absl::StatusOr<std::shared_ptr<Run>> Find(const grpc::CallbackServerContext& context,
                                            const std::string& name, bool needs_directory) const;
  RunTable* const runs_;
  Checkpointer* const checkpointer_;
};

class CheckpointPeerService final : public v1::CheckpointPeer::CallbackService {
 public:
  CheckpointPeerService(RunTable* runs, Checkpointer* checkpointer)
      : runs_(runs), checkpointer_(checkpointer) {}
  grpc::ServerUnaryReactor* SavePart(grpc::CallbackServerContext*, const v1::SavePartRequest*,
                                     v1::SavePartReply*) override;
  grpc::ServerUnaryReactor* Stage(grpc::CallbackServerContext*, const v1::StageRequest*,
                                  v1::StageReply*) override;

 private:
  // UNAVAILABLE where the run is not there: it may come.
  absl::StatusOr<std::shared_ptr<Run>> Find(const v1::PeerRun& peer) const;
  RunTable* const runs_;
  Checkpointer* const checkpointer_;
};

// FAILED_PRECONDITION with the setting that is missing.
absl::Status NoCheckpoints();

}  // namespace muond
