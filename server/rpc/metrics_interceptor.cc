#include "server/rpc/metrics_interceptor.h"

#include <string>

#include "absl/time/time.h"
#include "proto/status.h"
#include "proto/steady_time.h"

namespace muond {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

const char* TypeName(ServerRpcInfo::Type type) {
  switch (type) {
    case ServerRpcInfo::Type::UNARY:
      return "unary";
    case ServerRpcInfo::Type::CLIENT_STREAMING:
      return "client_stream";
    case ServerRpcInfo::Type::SERVER_STREAMING:
      return "server_stream";
    case ServerRpcInfo::Type::BIDI_STREAMING:
      return "bidi_stream";
  }
  return "unary";
}

// gRPC itself answers Unimplemented where a call was cancelled before its message could be read
// (the votes of a step that ended meanwhile); a method that came here is implemented.
absl::StatusCode CodeOf(const grpc::Status& status) {
  const absl::StatusCode code = FromGrpc(status).code();
  return code == absl::StatusCode::kUnimplemented ? absl::StatusCode::kCancelled : code;
}

class CallMetrics final : public grpc::experimental::Interceptor {
 public:
  explicit CallMetrics(RpcMetrics& metrics) : metrics_(metrics), started_(SteadyNow()) {
    metrics_.OnStarted();
  }
  // A call that ended without a status of ours was cancelled by its caller.
  ~CallMetrics() override {
    if (!handled_) metrics_.OnHandled(absl::StatusCode::kCancelled, SteadyNow() - started_);
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      handled_ = true;
      metrics_.OnHandled(CodeOf(methods->GetSendStatus()), SteadyNow() - started_);
    }
    methods->Proceed();
  }

 private:
  RpcMetrics& metrics_;
  const absl::Time started_;
  bool handled_ = false;
};

}  // namespace

// "/package.Service/Method": only methods that the server registered come here.
grpc::experimental::Interceptor* MetricsInterceptorFactory::CreateServerInterceptor(
    ServerRpcInfo* info) {
  const std::string path = info->method();
  const auto slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return nullptr;
  return new CallMetrics(
      metrics_->Rpc(path.substr(1, slash - 1), path.substr(slash + 1), TypeName(info->type())));
}

}  // namespace muond
