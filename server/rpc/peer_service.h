// The gRPC face of a daemon towards the other daemons of its runs; one file per verb.
#pragma once

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/peer.grpc.pb.h"
#include "server/run/run_table.h"

namespace muond {

class PeerService final : public v1::Peer::CallbackService {
 public:
  explicit PeerService(RunTable* runs) : runs_(runs) {}

  grpc::ServerUnaryReactor* Hello(grpc::CallbackServerContext*, const v1::HelloRequest*,
                                  v1::HelloReply*) override;
  grpc::ServerUnaryReactor* Vote(grpc::CallbackServerContext*, const v1::VoteRequest*,
                                 v1::VoteReply*) override;
  grpc::ServerUnaryReactor* Prepare(grpc::CallbackServerContext*, const v1::PrepareRequest*,
                                    v1::PrepareReply*) override;
  grpc::ServerUnaryReactor* Raise(grpc::CallbackServerContext*, const v1::RaiseRequest*,
                                  v1::RaiseReply*) override;
  grpc::ServerUnaryReactor* StateHashes(grpc::CallbackServerContext*,
                                        const v1::StateHashesRequest*,
                                        v1::StateHashesReply*) override;

 private:
  // The run that a peer speaks of; NOT_FOUND, or FAILED_PRECONDITION when it plans otherwise or
  // is of another version than this daemon works with. `exact`: see Run::CheckPeer.
  absl::StatusOr<std::shared_ptr<Run>> Find(const v1::PeerRun& peer, bool exact = false) const;

  RunTable* const runs_;
};

}  // namespace muond
