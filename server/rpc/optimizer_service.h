// The gRPC face of the daemon: one file per verb. A handler validates, turns messages into values,
// asks the run, and turns the answer back; it holds no state of its own and waits for nothing.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "kernels/device_memory.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "server/faults/fault_points.h"
#include "server/metrics/daemon_metrics.h"
#include "server/run/run_table.h"
#include "server/transport/arena_table.h"
#include "server/transport/pair_table.h"

namespace muond {

struct RpcContext {
  RunTable* runs = nullptr;
  DaemonMetrics* metrics = nullptr;
  std::shared_ptr<Peers> peers;
  Executor* peer_executor = nullptr;
  FaultInjector* faults = nullptr;
  ArenaTable* arenas = nullptr;
  std::string arena_socket;      // path; empty: the daemon has none
  std::string why_no_arenas;     // then
  std::string boot_id;           // of this host
  std::string pid_namespace;     // of this process
  std::vector<kernels::DeviceMemory*> gpus;      // that trainers can name, in the devices' order
  kernels::DeviceMemory* host_memory = nullptr;  // for pointers of in-process trainers
  PairTable* pairs = nullptr;                    // says itself why there are none
  std::int64_t max_chunk_bytes = std::int64_t{4} << 20;
  absl::Duration step_deadline = absl::Seconds(120);
  std::string version;              // of the daemon
  std::string backend;              // name
  std::string backend_description;
  std::string daemon_name;          // what routing reports call the owner
  absl::Time started;
};

// The streams of chunks are read and written as raw buffers (proto/chunk_message.h).
using OptimizerServiceBase =
    v1::Optimizer::WithRawCallbackMethod_Initialize<v1::Optimizer::WithRawCallbackMethod_Push<
        v1::Optimizer::WithRawCallbackMethod_Pull<v1::Optimizer::CallbackService>>>;

class OptimizerService final : public OptimizerServiceBase {
 public:
  explicit OptimizerService(RpcContext context) : context_(std::move(context)) {}

  grpc::ServerUnaryReactor* Register(grpc::CallbackServerContext*, const v1::RegisterRequest*,
                                     v1::RegisterReply*) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* Initialize(grpc::CallbackServerContext*,
                                                        grpc::ByteBuffer*) override;
  grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext*, const v1::BeginRequest*,
                                  v1::BeginReply*) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* Push(grpc::CallbackServerContext*,
                                                  grpc::ByteBuffer*) override;
  grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext*, const v1::FinishRequest*,
                                   v1::FinishReply*) override;
  grpc::ServerUnaryReactor* Skip(grpc::CallbackServerContext*, const v1::SkipRequest*,
                                 v1::FinishReply*) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Pull(grpc::CallbackServerContext*,
                                                   const grpc::ByteBuffer*) override;
  grpc::ServerUnaryReactor* OpenArena(grpc::CallbackServerContext*, const v1::OpenArenaRequest*,
                                      v1::OpenArenaReply*) override;
  grpc::ServerUnaryReactor* CloseArena(grpc::CallbackServerContext*, const v1::CloseArenaRequest*,
                                       v1::CloseArenaReply*) override;
  grpc::ServerBidiReactor<v1::PullArenaRequest, v1::PullReply>* PullArena(
      grpc::CallbackServerContext*) override;
  grpc::ServerUnaryReactor* Exchange(grpc::CallbackServerContext*, const v1::ExchangeRequest*,
                                     v1::ExchangeReply*) override;
  grpc::ServerWriteReactor<v1::OpenPairReply>* OpenPair(grpc::CallbackServerContext*,
                                                        const v1::OpenPairRequest*) override;
  grpc::ServerUnaryReactor* ClosePair(grpc::CallbackServerContext*, const v1::ClosePairRequest*,
                                      v1::ClosePairReply*) override;
  grpc::ServerUnaryReactor* AddParameters(grpc::CallbackServerContext*,
                                          const v1::AddParametersRequest*,
                                          v1::AddParametersReply*) override;
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
