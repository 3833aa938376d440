// The optimizer service inside a program: the same run loop and engine behind gRPC's in-process
// channel, no sockets unless asked for. The daemon's main is this plus configuration and signals.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Channel;
}

namespace muond::kernels {
class Backend;
class DeviceMemory;
struct BackendOptions;
}  // namespace muond::kernels

namespace muond {

struct NcclPlatform;

// A setting as the operator made it, for those who ask.
struct ServiceSetting {
  std::string name;
  std::vector<std::string> values;
  std::string source;
};

struct ServiceOptions {
  std::string backend = "cpu";                 // "auto", "cuda", "cpu" or "reference"
  std::vector<std::string> devices = {"all"};  // of cuda: "all", ordinals or UUIDs
  std::string cpu_products = "auto";           // "auto", "f32" or "bf16"
  int threads = 0;                             // of the backend; 0: one per core
  std::vector<std::string> listen;  // "unix:///path", "127.0.0.1:0"; empty: in-process only
  // Who may use the unix sockets beside the daemon's own user and root: users, and groups as
  // "@name" (transport/peer_gate.h).
  std::vector<std::string> socket_users;
  // PEM files (proto/tls.h), all three or none: with them each TCP address of `listen` asks for a
  // certificate, and calls to other daemons show this one.
  std::string tls_cert, tls_key, tls_ca;
  std::string tls_server_name;  // that the daemons' certificates carry; empty: the address's host
  absl::Duration tls_refresh = absl::Seconds(30);
  // Answers grpc.health.v1 and nothing else, plainly: for probes that have no certificate. Empty:
  // off.
  std::string health_address;
  // Tells the protocol to whoever may connect (grpc.reflection), for tools like grpcurl.
  bool reflection = false;
  std::string metrics_address;      // "127.0.0.1:0"; empty: no HTTP exposer
  std::int64_t max_chunk_bytes = std::int64_t{4} << 20;
  std::int64_t max_arena_bytes = std::int64_t{1} << 30;  // of all trainers' together; 0: none
  std::int64_t max_arenas = 256;  // and as many NCCL pairs
  // NCCL with trainers on other GPUs: "auto", where it is found, or "off"; which library (empty:
  // nccl/library.h); and for how long a trainer may not join, or an exchange not end.
  std::string nccl = "off";  // or "auto"
  std::string nccl_library;
  absl::Duration nccl_deadline = absl::Seconds(20);
  std::int64_t max_tensor_bytes = std::int64_t{2} << 30;
  std::int64_t max_run_bytes = 0;  // 0: what the machine has free
  std::int64_t max_parameters = 1'000'000;
  std::int64_t max_runs = 16;
  std::int64_t max_world_size = 65'536;
  // The daemons that share each run, this one too, and which entry is its own
  // (cluster/peer_list.h). Empty: it has no peers.
  std::string peers;
  std::string advertise;
  int peers_expected = 0;
  absl::Duration peer_patience = absl::Seconds(5);
  // Where runs keep their generation, so that a daemon that restarts does not go back to an older
  // one; must exist. Empty: nowhere.
  std::string state_dir;
  // Newton-Schulz before the verdict, while gradients still arrive.
  bool overlap = false;
  absl::Duration step_deadline = absl::Seconds(120);  // of Finish calls that name no shorter wait
  // Checkpoints (run/checkpointer.h); no directory: none.
  std::string checkpoint_dir;
  std::int64_t checkpoint_every_steps = 0;
  absl::Duration checkpoint_every;
  std::int64_t checkpoint_keep = 3;
  // With several daemons: each holds a copy of the state of the one before it, and the gradients of
  // at most so many steps since; the same on all. 0: none.
  std::int64_t buddy_steps = 0;
  std::string restore = "latest";
  std::string fault_points;                           // "name[:after[:count]],..."; tests only
  std::int64_t diagnostics_every = 100;  // steps between sampled diagnostics; 0: none
  std::int64_t summary_every = 100;      // steps between lines of the log; 0: none
  // Hears why a device can't be used by this process any more, on the thread of the call that found
  // out, perhaps more than once. Nothing: the runs that have state there fail, one by one.
  std::function<void(const std::string&)> on_device_lost;
  std::vector<ServiceSetting> settings;  // what Admin.Settings tells
  // Tests only: NCCL and the GPU that it is used on, instead of those of the machine.
  std::function<absl::StatusOr<NcclPlatform>()> find_nccl;
  // Tests only: the backends, one per device, instead of those that the settings ask for.
  std::function<std::vector<std::unique_ptr<kernels::Backend>>(const kernels::BackendOptions&)>
      make_backends;
  // Tests only: their memories, in the same order.
  std::function<std::vector<std::unique_ptr<kernels::DeviceMemory>>()> make_memories;
};

class Service {
 public:
  // INVALID_ARGUMENT for options that make no sense, UNAVAILABLE when an address cannot be bound.
  static absl::StatusOr<std::unique_ptr<Service>> Start(const ServiceOptions& options);
  // Stops as Stop with no grace.
  ~Service();

  // Calls through this channel never leave the process.
  std::shared_ptr<grpc::Channel> channel();
  // What was bound, in the order of ServiceOptions::listen, port 0 resolved: "127.0.0.1:41233".
  const std::vector<std::string>& addresses() const;
  std::string metrics_address() const;
  std::string health_address() const;  // likewise; empty: off
  // A line of the log was written: counted. The level's name is spdlog's.
  void OnLogMessage(std::string_view level);
  // The Prometheus exposition of this moment, as GET /metrics gives it.
  std::string Metrics();

  // Whether gRPC's threads still answer and no run's lock is stuck: asks itself for its status, and
  // returns DEADLINE_EXCEEDED when `timeout` has passed. A device that computes for long, or hangs,
  // does not count: step-deadline tells those who wait for it.
  absl::Status CheckAlive(absl::Duration timeout);

  // Tests only: how often the fault point of that name fired (server/faults); checked that there is
  // one.
  std::int64_t FaultsFired(std::string_view point) const;

  // Health NOT_SERVING; runs are saved where there is a checkpoint directory and any grace; running
  // calls may finish within `grace`, streams are then cancelled.
  void Stop(absl::Duration grace);

 private:
  struct Impl;
  explicit Service(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace muond
