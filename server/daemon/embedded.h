// The optimizer service inside a program: the same run loop and engine behind gRPC's in-process
// channel, no sockets unless asked for. The daemon's main is this plus configuration and signals.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Channel;
}

namespace muond {

struct ServiceOptions {
  std::string backend = "cpu";             // "cpu", "reference" or "auto"
  int threads = 0;                         // of the backend; 0: one per core
  std::vector<std::string> listen;         // "unix:///path", "127.0.0.1:0"; empty: in-process only
  std::string metrics_address;             // "127.0.0.1:0"; empty: no HTTP exposer
  std::int64_t max_chunk_bytes = std::int64_t{4} << 20;
  std::int64_t max_tensor_bytes = std::int64_t{2} << 30;
  std::int64_t max_run_bytes = 0;          // 0: what the machine has free
  std::int64_t max_parameters = 1'000'000;
  std::int64_t max_runs = 16;
  std::int64_t max_world_size = 65'536;
  absl::Duration step_deadline = absl::Seconds(120);  // of Finish calls that name no shorter wait
  std::string fault_points;                // "name[:after[:count]],..."; tests only
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
  // The Prometheus exposition of this moment, as GET /metrics gives it.
  std::string Metrics();

  // Health NOT_SERVING, running calls may finish within `grace`, streams are then cancelled.
  void Stop(absl::Duration grace);

 private:
  struct Impl;
  explicit Service(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace muond
