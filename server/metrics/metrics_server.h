// The daemon's HTTP port: /metrics for Prometheus, /healthz and /readyz for probes.
//
// Own handlers on civetweb rather than prometheus-cpp's Exposer, which adds a summary in
// microseconds of its own to every scrape and has no room for the probes. Plain HTTP, read-only.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/metrics/daemon_metrics.h"

namespace muond {

class MetricsServer {
 public:
  // Listens at `address`, "127.0.0.1:9470", "[::1]:9470" or "localhost:9470"; port 0 takes a free
  // one. `metrics` must outlive the server. INVALID_ARGUMENT for another form of address,
  // UNAVAILABLE with the cause when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address,
                                                              const DaemonMetrics* metrics);
  // Returns when no request is being answered any more.
  ~MetricsServer();

  // With the port that was bound: "127.0.0.1:41233".
  const std::string& address() const { return address_; }

 private:
  struct Impl;
  MetricsServer(std::unique_ptr<Impl> impl, std::string address);
  std::unique_ptr<Impl> impl_;
  std::string address_;
};

}  // namespace muond
