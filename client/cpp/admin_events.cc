// The calls of admin.proto.
#include "absl/time/time.h"
#include "client/cpp/admin.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"

namespace muond::client {
namespace {

template <typename Request, typename Reply>
absl::StatusOr<Reply> Ask(const std::shared_ptr<grpc::Channel>& channel, absl::Duration timeout,
                          grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                  const Request&, Reply*),
                          const Request& request) {
  Reply reply;
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(timeout));
  const auto stub = v1::Admin::NewStub(channel);
  if (const grpc::Status status = (stub.get()->*method)(&context, request, &reply); !status.ok()) {
    return FromGrpc(status);
  }
  return reply;
}

}  // namespace

absl::StatusOr<v1::LastStepsReply> Admin::LastSteps(const std::string& run) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::LastStepsRequest request;
  request.set_run(run);
  return Ask(channel_, timeout_, &v1::Admin::Stub::LastSteps, request);
}

absl::StatusOr<v1::SettingsReply> Admin::Settings() {
  MUOND_RETURN_IF_ERROR(endpoint_);
  return Ask(channel_, timeout_, &v1::Admin::Stub::Settings, v1::SettingsRequest());
}

absl::StatusOr<v1::DrainReply> Admin::Drain(bool cancel) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::DrainRequest request;
  request.set_cancel(cancel);
  return Ask(channel_, timeout_, &v1::Admin::Stub::Drain, request);
}

absl::Status Admin::Watch(const std::string& run, absl::Duration longest,
                          const std::function<bool(const v1::StepEvent&)>& on_event) {
  MUOND_RETURN_IF_ERROR(endpoint_);
  v1::WatchRequest request;
  request.set_run(run);
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(longest));
  const auto stub = v1::Admin::NewStub(channel_);
  const auto reader = stub->Watch(&context, request);
  v1::StepEvent event;
  while (reader->Read(&event)) {
    if (on_event(event)) continue;
    context.TryCancel();
    reader->Finish();  // cancelled, by us
    return absl::OkStatus();
  }
  return FromGrpc(reader->Finish());
}

}  // namespace muond::client
