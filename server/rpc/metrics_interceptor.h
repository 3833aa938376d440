// Counts and times every call for grpc_server_started_total, _handled_total and _handling_seconds.
#pragma once

#include "grpcpp/support/server_interceptor.h"
#include "server/metrics/daemon_metrics.h"

namespace muond {

class MetricsInterceptorFactory final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit MetricsInterceptorFactory(DaemonMetrics* metrics) : metrics_(metrics) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override;

 private:
  DaemonMetrics* const metrics_;
};

}  // namespace muond
