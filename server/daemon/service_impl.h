// What a service is made of, in the order of construction.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server.h"
#include "kernels/device_memory.h"
#include "proto/tls.h"
#include "server/daemon/embedded.h"
#include "server/daemon/unix_listener.h"
#include "server/metrics/metrics_server.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/buddy_service.h"
#include "server/rpc/checkpoint_service.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/peer_service.h"
#include "server/transport/arena_socket.h"

namespace muond {

// The certificates that the options name.
TlsFiles TlsOf(const ServiceOptions& options);

// Destroyed in reverse, the executors' threads before what they use.
struct Service::Impl {
  kernels::NewtonSchulzFault newton_schulz_fault;
  std::vector<std::unique_ptr<kernels::Backend>> backends;  // one per device
  // Likewise, null for the host's; and the host's own, for pointers of in-process trainers.
  std::vector<std::unique_ptr<kernels::DeviceMemory>> memories;
  std::unique_ptr<kernels::DeviceMemory> host_memory;
  FaultInjector faults;
  std::unique_ptr<DaemonMetrics> metrics;
  StepEvents events;
  std::unique_ptr<ArenaTable> arenas;
  std::string arena_path, why_no_arenas;  // one of them is empty
  std::unique_ptr<PairTable> pairs;
  std::unique_ptr<RunTable> runs;
  std::vector<std::unique_ptr<Executor>> executors;  // one per device
  std::shared_ptr<Peers> peers;
  std::unique_ptr<Executor> peer_executor;
  std::unique_ptr<Executor> buddy_executor;  // state that comes back takes as long as it takes
  std::unique_ptr<OptimizerService> service;
  std::unique_ptr<PeerService> peer_service;
  std::unique_ptr<AdminService> admin_service;
  std::unique_ptr<Checkpointer> checkpointer;  // null: no checkpoints
  std::unique_ptr<CheckpointService> checkpoint_service;
  std::unique_ptr<CheckpointPeerService> checkpoint_peer_service;
  std::unique_ptr<BuddyService> buddy_service;
  std::unique_ptr<ArenaSocket> arena_socket;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<UnixListener> unix_listener;  // null: no unix socket
  grpc::CallbackGenericService no_service;  // of health_server: UNIMPLEMENTED to all but health
  std::unique_ptr<grpc::Server> health_server;
  std::string health_address;
  std::unique_ptr<MetricsServer> metrics_server;
  std::vector<std::string> addresses;
  bool stopped = false;

  absl::Status MakeRuns(const ServiceOptions& options, std::vector<EngineDevice> devices);
  absl::Status OpenCheckpoints(const ServiceOptions& options, RunContext& context);
  void MakeStateServices();  // what daemons ask each other, and checkpoints
  // Arenas and NCCL pairs.
  void PreparePaths(const ServiceOptions& options);
  void PrepareArenas(const ServiceOptions& options);
  void PreparePairs(const ServiceOptions& options);
  absl::StatusOr<NcclPlatform> FindNccl(const ServiceOptions& options) const;
  // The memories of devices that trainers can name.
  std::vector<kernels::DeviceMemory*> Gpus() const;
  absl::Status Listen(const ServiceOptions& options);
  absl::Status ListenForProbes(const std::string& address);
  void SetServing(bool serving);
  std::unique_ptr<AdminService> MakeAdminService(const std::vector<ServiceSetting>& settings);
  void ListenForLoss(const ServiceOptions& options);
  void WatchQueues();
};

}  // namespace muond
