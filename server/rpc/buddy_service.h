// The gRPC face of what a daemon holds for another one.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/buddy.grpc.pb.h"
#include "server/engine/executor.h"
#include "server/run/run_table.h"

namespace muond {

class BuddyService final : public v1::Buddy::CallbackService {
 public:
  // `executor`: for calls that wait for other daemons.
  BuddyService(RunTable* runs, Executor* executor) : runs_(runs), executor_(executor) {}

  grpc::ServerUnaryReactor* Put(grpc::CallbackServerContext*, const v1::BuddyPutRequest*,
                                v1::BuddyPutReply*) override;
  grpc::ServerUnaryReactor* Index(grpc::CallbackServerContext*, const v1::BuddyIndexRequest*,
                                  v1::BuddyIndexReply*) override;
  grpc::ServerUnaryReactor* Read(grpc::CallbackServerContext*, const v1::BuddyReadRequest*,
                                 v1::BuddyReadReply*) override;
  grpc::ServerUnaryReactor* Recover(grpc::CallbackServerContext*, const v1::BuddyRecoverRequest*,
                                    v1::BuddyRecoverReply*) override;

 private:
  // NOT_FOUND, or FAILED_PRECONDITION when the peer plans otherwise.
  absl::StatusOr<std::shared_ptr<Run>> Find(const v1::PeerRun& peer) const;

  RunTable* const runs_;
  Executor* const executor_;
};

}  // namespace muond
