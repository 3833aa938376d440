#include "client/cpp/admin.h"

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"
#include "client/cpp/retry.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/impl/client_unary_call.h"
#include "grpcpp/impl/rpc_method.h"
#include "proto/channel.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

template <typename Request, typename Reply>
absl::StatusOr<Reply> Ask(const std::shared_ptr<grpc::Channel>& channel, absl::Duration timeout,
                          grpc::Status (v1::Optimizer::Stub::*method)(grpc::ClientContext*,
                                                                      const Request&, Reply*),
                          const Request& request) {
  Reply reply;
  const auto stub = v1::Optimizer::NewStub(channel);
  MUOND_RETURN_IF_ERROR(
      CallOnce(*stub, method, request, &reply, SteadyNow() + timeout).status);
  return reply;
}

template <typename Reply, typename Request>
absl::StatusOr<Reply> AskCheckpoint(const std::shared_ptr<grpc::Channel>& channel,
                                    absl::Duration timeout,
                                    grpc::Status (v1::Checkpoint::Stub::*method)(
                                        grpc::ClientContext*, const Request&, Reply*),
                                    const Request& request) {
  const auto stub = v1::Checkpoint::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(timeout));
  Reply reply;
  MUOND_RETURN_IF_ERROR(FromGrpc((stub.get()->*method)(&context, request, &reply)));
  return reply;
}

}  // namespace

Admin::Admin(const std::string& endpoint, absl::Duration timeout, const TlsFiles& tls)
    : timeout_(timeout) {
  const absl::StatusOr<std::string> target = ResolveTarget(endpoint);
  const absl::StatusOr<ChannelSecurity> security = ResolveSecurity(tls);
  endpoint_ = target.ok() ? security.status() : target.status();
  if (endpoint_.ok()) channel_ = MakeChannel(*target, kControlMessageBytes, *security);
}

Admin::Admin(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout)
    : channel_(std::move(channel)), timeout_(timeout) {}

absl::StatusOr<v1::StatusReply> Admin::Status(const std::string& run) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::StatusRequest request;
  request.set_run(run);
  return Ask(channel_, timeout_, &v1::Optimizer::Stub::Status, request);
}

absl::StatusOr<v1::DescribeParametersReply> Admin::DescribeParameters(
    const std::string& run, const std::vector<std::string>& names) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::DescribeParametersRequest request;
  request.set_run(run);
  for (const std::string& name : names) request.add_names(name);
  return Ask(channel_, timeout_, &v1::Optimizer::Stub::DescribeParameters, request);
}

absl::StatusOr<v1::DigestReply> Admin::Digest(const std::string& run, bool per_parameter) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::DigestRequest request;
  request.set_run(run);
  request.set_per_parameter(per_parameter);
  return Ask(channel_, timeout_, &v1::Optimizer::Stub::Digest, request);
}

absl::StatusOr<v1::SaveReply> Admin::SaveCheckpoint(const std::string& run) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::SaveRequest request;
  request.set_run(run);
  request.set_wait_ms(absl::ToInt64Milliseconds(timeout_));
  return AskCheckpoint<v1::SaveReply>(channel_, timeout_, &v1::Checkpoint::Stub::Save, request);
}

absl::StatusOr<v1::RestoreReply> Admin::RestoreCheckpoint(const std::string& run,
                                                          const std::string& name,
                                                          bool allow_relayout) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::RestoreRequest request;
  request.set_run(run);
  request.set_name(name);
  request.set_allow_relayout(allow_relayout);
  request.set_wait_ms(absl::ToInt64Milliseconds(timeout_));
  return AskCheckpoint<v1::RestoreReply>(channel_, timeout_, &v1::Checkpoint::Stub::Restore,
                                         request);
}

absl::StatusOr<std::string> Admin::Health(const std::string& service) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  // grpc.health.v1's messages have one field each, number 1, a string and an enum: on the wire they
  // are protobuf's own wrappers, which spares a copy of the protocol.
  google::protobuf::StringValue request;
  request.set_value(service);
  google::protobuf::Int32Value reply;
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(timeout_));
  const grpc::internal::RpcMethod check("/grpc.health.v1.Health/Check",
                                        grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall(channel_.get(), check, &context, request, &reply);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return "SERVICE_UNKNOWN";
  if (!status.ok()) return FromGrpc(status);
  switch (reply.value()) {
    case 1: return "SERVING";
    case 2: return "NOT_SERVING";
    case 3: return "SERVICE_UNKNOWN";
    default: return "UNKNOWN";
  }
}

}  // namespace muond::client
