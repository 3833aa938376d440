// The gRPC face of the daemon: one file per verb. A handler validates, turns messages into values,
// asks the run, and turns the answer back; it holds no state of its own and waits for nothing.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "server/faults/fault_points.h"
#include "server/metrics/daemon_metrics.h"
#include "server/run/run_table.h"

namespace muond {

struct RpcContext {
  RunTable* runs = nullptr;
  DaemonMetrics* metrics = nullptr;
  std::shared_ptr<Peers> peers;
  Executor* peer_executor = nullptr;
  FaultInjector* faults = nullptr;
  std::int64_t max_chunk_bytes = std::int64_t{4} << 20;
  absl::Duration step_deadline = absl::Seconds(120);
  std::string version;              // of the daemon
  std::string backend;              // name
  std::string backend_description;
  std::string daemon_name;          // what routing reports call the owner
  absl::Time started;
};

class OptimizerService final : public v1::Optimizer::CallbackService {
 public:
  explicit OptimizerService(RpcContext context) : context_(std::move(context)) {}

  grpc::ServerUnaryReactor* Register(grpc::CallbackServerContext*, const v1::RegisterRequest*,
                                     v1::RegisterReply*) override;
  grpc::ServerReadReactor<v1::InitializeRequest>* Initialize(grpc::CallbackServerContext*,
                                                             v1::InitializeReply*) override;
  grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext*, const v1::BeginRequest*,
                                  v1::BeginReply*) override;
  grpc::ServerReadReactor<v1::PushRequest>* Push(grpc::CallbackServerContext*,
                                                 v1::PushReply*) override;
  grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext*, const v1::FinishRequest*,
                                   v1::FinishReply*) override;
  grpc::ServerUnaryReactor* Skip(grpc::CallbackServerContext*, const v1::SkipRequest*,
                                 v1::FinishReply*) override;
  grpc::ServerWriteReactor<v1::PullReply>* Pull(grpc::CallbackServerContext*,
                                                const v1::PullRequest*) override;
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext*, const v1::CloseRequest*,
                                  v1::CloseReply*) override;
  grpc::ServerUnaryReactor* RaiseGeneration(grpc::CallbackServerContext*,
                                            const v1::RaiseGenerationRequest*,
                                            v1::RaiseGenerationReply*) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext*, const v1::StatusRequest*,
                                   v1::StatusReply*) override;
  grpc::ServerUnaryReactor* DescribeParameters(grpc::CallbackServerContext*,
                                               const v1::DescribeParametersRequest*,
                                               v1::DescribeParametersReply*) override;
  grpc::ServerUnaryReactor* Digest(grpc::CallbackServerContext*, const v1::DigestRequest*,
                                   v1::DigestReply*) override;

 private:
  const RpcContext context_;
};

}  // namespace muond
