// What an operator asks a daemon: status, parameters, digests, health, checkpoints. Used by muonctl
// and tests.
// Every call has a deadline; errors are the daemon's, UNAVAILABLE when it does not answer.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muond/v1/admin.grpc.pb.h"
#include "muond/v1/checkpoint.grpc.pb.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/tls.h"

namespace muond::client {

class Admin {
 public:
  // endpoint as in SessionOptions. Connects lazily: the first call finds out, also that the
  // endpoint makes no sense (INVALID_ARGUMENT). tls as in SessionOptions.
  Admin(const std::string& endpoint, absl::Duration timeout, const TlsFiles& tls = {});
  Admin(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout);

  absl::StatusOr<v1::StatusReply> Status(const std::string& run = "");
  absl::StatusOr<v1::DescribeParametersReply> DescribeParameters(
      const std::string& run, const std::vector<std::string>& names = {});
  absl::StatusOr<v1::DigestReply> Digest(const std::string& run, bool per_parameter = false);
  // Saves the run on all its daemons; OK once it is durable. FAILED_PRECONDITION without
  // a checkpoint directory, or when the run has no state to keep.
  absl::StatusOr<v1::SaveReply> SaveCheckpoint(const std::string& run);
  // Takes the run back to a checkpoint, by name ("ckpt-1200"), or to the newest that is readable.
  // Trainers rejoin and go on at the reply's next step. On an error nothing has changed.
  absl::StatusOr<v1::RestoreReply> RestoreCheckpoint(const std::string& run,
                                                     const std::string& name = "",
                                                     bool allow_relayout = false);
  // grpc.health.v1: "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN". Services: "", "liveness",
  // "readiness".
  absl::StatusOr<std::string> Health(const std::string& service = "");

  // admin.proto's calls. `run` empty: all runs.
  absl::StatusOr<v1::LastStepsReply> LastSteps(const std::string& run = "");
  absl::StatusOr<v1::SettingsReply> Settings();
  absl::StatusOr<v1::DrainReply> Drain(bool cancel);
  // Hands each event to `on_event` until that returns false (OK), `longest` has passed
  // (DEADLINE_EXCEEDED) or the daemon goes away. Blocks.
  absl::Status Watch(const std::string& run, absl::Duration longest,
                     const std::function<bool(const v1::StepEvent&)>& on_event);

 private:
  absl::Status endpoint_;  // why there is no channel, told by every call
  std::shared_ptr<grpc::Channel> channel_;
  absl::Duration timeout_;
};

}  // namespace muond::client
