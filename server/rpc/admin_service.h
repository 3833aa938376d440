// What operators ask (admin.proto), one file per verb: step events, settings, draining.
#pragma once

#include <functional>
#include <utility>

#include "grpcpp/grpcpp.h"
#include "muond/v1/admin.grpc.pb.h"
#include "server/run/run_table.h"
#include "server/run/step_events.h"

namespace muond {

// All of it outlives the server.
struct AdminContext {
  RunTable* runs = nullptr;
  StepEvents* events = nullptr;
  v1::SettingsReply settings;
  std::function<void(bool ready)> set_ready;  // the daemon's readiness, for probes and metrics
};

v1::StepEvent ToProto(const StepEvent& event);

class AdminService final : public v1::Admin::CallbackService {
 public:
  explicit AdminService(AdminContext context) : context_(std::move(context)) {}

  grpc::ServerWriteReactor<v1::StepEvent>* Watch(grpc::CallbackServerContext*,
                                                 const v1::WatchRequest*) override;
  grpc::ServerUnaryReactor* LastSteps(grpc::CallbackServerContext*, const v1::LastStepsRequest*,
                                      v1::LastStepsReply*) override;
  grpc::ServerUnaryReactor* Settings(grpc::CallbackServerContext*, const v1::SettingsRequest*,
                                     v1::SettingsReply*) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext*, const v1::DrainRequest*,
                                  v1::DrainReply*) override;

 private:
  const AdminContext context_;
};

}  // namespace muond
