// The session functions of muond.h: joining, values, reports. session_step.cc has the steps.
#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/strings/str_split.h"
#include "client/c/convert.h"
#include "client/c/handles.h"
#include "client/c/service.h"
#include "client/cpp/connection.h"
#include "client/cpp/retry.h"
#include "google/protobuf/struct.pb.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::c {
namespace {

// "0.1" of "0.1.0": versions that differ there do not understand each other for certain.
std::string Series(const std::string& version) {
  const std::vector<std::string> parts = absl::StrSplit(version, '.');
  return parts.size() < 2 ? version : parts[0] + "." + parts[1];
}

// Asked before anything is registered: a daemon of another version might misread what follows.
absl::Status CheckVersion(client::Admin& admin, const std::string& peer, absl::Duration timeout) {
  std::string version;
  const client::RetryPlan plan{.what = "daemon: version", .peer = peer, .timeout = timeout};
  const client::CallResult result =
      client::CallWithRetries(plan, [&](const client::Attempt&) -> client::CallResult {
        const auto reply = admin.Status();
        if (reply.ok()) version = reply->version();
        return {reply.status(), std::nullopt};
      });
  if (absl::IsUnimplemented(result.status)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "daemon \"%s\": version: what answers there is no muond, or one of another protocol than "
        "this client's, %s (%s)",
        peer, MUOND_VERSION, result.status.message()));
  }
  MUOND_RETURN_IF_ERROR(result.status);
  if (Series(version) == Series(MUOND_VERSION)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("daemon \"%s\": version: it is %s, this client %s: install one of the "
                      "other's series",
                      peer, version, MUOND_VERSION));
}

absl::Duration Seconds(double value, absl::Duration otherwise) {
  return value == 0 ? otherwise : absl::Seconds(value);
}

absl::StatusOr<client::SessionOptions> Options(const muond_session_options& given) {
  client::SessionOptions options;
  options.endpoint = Text(given.endpoint, given.endpoint_bytes);
  if (given.service != nullptr) options.channel = ChannelTo(given.service);
  options.call_timeout = Seconds(given.call_timeout, options.call_timeout);
  options.step_timeout = Seconds(given.step_timeout, options.step_timeout);
  options.bulk_timeout = Seconds(given.bulk_timeout, options.bulk_timeout);
  if (given.chunk_bytes != 0) options.chunk_bytes = given.chunk_bytes;
  if (given.transport_bytes > 0) options.transport = Text(given.transport, given.transport_bytes);
  options.recovery_timeout =
      std::max(Seconds(given.recovery_timeout, options.recovery_timeout), absl::ZeroDuration());
  if (given.memory == MUOND_CUDA) {
    options.gpu = given.device;
  } else if (given.memory != MUOND_HOST) {
    return absl::UnimplementedError(
        absl::StrFormat("session options: memory %d: this version does not know it", given.memory));
  }
  if (given.gradient_dtype != 0) {
    MUOND_ASSIGN_OR_RETURN(options.gpu_gradient_dtype,
                           FromProto(static_cast<v1::Dtype>(given.gradient_dtype)));
  }
  return options;
}

absl::StatusOr<std::unique_ptr<muond_session>> Open(const muond_session_options& given,
                                                    const std::string& registration) {
  v1::RegisterRequest request;
  MUOND_RETURN_IF_ERROR(FromJson("registration", registration, &request));
  MUOND_ASSIGN_OR_RETURN(RunSpec spec, FromProto(request.run()));
  MUOND_ASSIGN_OR_RETURN(const RankSlices slices, SlicesFromProto(request.slices()));
  MUOND_ASSIGN_OR_RETURN(client::SessionOptions options, Options(given));
  options.session = request.session();
  std::string peer = "in-process";
  if (options.channel == nullptr) {
    MUOND_ASSIGN_OR_RETURN(peer, client::ResolveTarget(options.endpoint));
  }
  auto handle = std::make_unique<muond_session>();
  handle->run = spec.name;
  const auto asking = [&](absl::Duration timeout) {
    return options.channel != nullptr ? std::make_unique<client::Admin>(options.channel, timeout)
                                      : std::make_unique<client::Admin>(options.endpoint, timeout);
  };
  handle->admin = asking(options.call_timeout);
  handle->checkpoints = asking(options.bulk_timeout);
  MUOND_RETURN_IF_ERROR(CheckVersion(*handle->admin, peer, options.call_timeout));
  MUOND_ASSIGN_OR_RETURN(handle->session,
                         client::Session::Open(spec, request.rank(), slices, options));
  return handle;
}

muond_position PositionOf(const client::Session& session) {
  muond_position position{};
  position.generation = session.generation();
  position.next_step = session.next_step();
  position.loss_scale = session.loss_scale();
  position.state = static_cast<int32_t>(session.state());
  position.daemons = session.daemons();
  position.last_step = -1;
  if (const auto& last = session.last_outcome(); last.has_value()) {
    position.last_step = last->step;
    position.last_applied = last->applied ? 1 : 0;
    position.last_cause = static_cast<int32_t>(ToProto(last->cause));
  }
  return position;
}

}  // namespace
}  // namespace muond::c

using namespace muond::c;  // NOLINT: what follows is the C side of that namespace

extern "C" {

int32_t muond_session_open(const muond_session_options* options, const char* registration,
                           size_t registration_bytes, muond_session** session,
                           muond_error** error) {
  return Guard(error, [&]() -> absl::Status {
    MUOND_RETURN_IF_ERROR(CheckThere("session", session));
    *session = nullptr;
    MUOND_ASSIGN_OR_RETURN(const muond_session_options given,
                           ReadStruct("session options", options));
    MUOND_ASSIGN_OR_RETURN(auto opened, Open(given, Text(registration, registration_bytes)));
    *session = opened.release();
    return absl::OkStatus();
  });
}

void muond_session_free(muond_session* session) { delete session; }

int32_t muond_session_close(muond_session* session, int32_t* closed, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const bool gone, session->session->Close());
    if (closed != nullptr) *closed = gone ? 1 : 0;
    return absl::OkStatus();
  });
}

int32_t muond_session_position(muond_session* session, muond_position* position,
                               muond_error** error) {
  return WithSession(session, error, [&] {
    return WriteStruct("position", PositionOf(*session->session), position);
  });
}

int32_t muond_session_describe(muond_session* session, muond_text** json, muond_error** error) {
  return WithText(session, json, error, [&] { return ToJson(session->session->registered()); });
}

int32_t muond_session_transports(muond_session* session, muond_text** json, muond_error** error) {
  return WithText(session, json, error, [&] {
    google::protobuf::ListValue list;
    for (const auto& chosen : session->session->transports()) {
      auto& fields = *list.add_values()->mutable_struct_value()->mutable_fields();
      fields["daemon"].set_string_value(chosen.daemon);
      fields["name"].set_string_value(chosen.name);
      fields["reason"].set_string_value(chosen.reason);
    }
    return ToJson(list);
  });
}

int32_t muond_session_status(muond_session* session, muond_text** json, muond_error** error) {
  return WithText(session, json, error, [&] { return Json(session->admin->Status(session->run)); });
}

int32_t muond_session_digest(muond_session* session, muond_text** json, muond_error** error) {
  return WithText(session, json, error, [&] { return Json(session->admin->Digest(session->run)); });
}

int32_t muond_session_last_outcome(muond_session* session, muond_text** json,
                                   muond_error** error) {
  return WithText(session, json, error, [&]() -> absl::StatusOr<std::string> {
    const auto& last = session->session->last_outcome();
    if (!last.has_value()) {
      return absl::NotFoundError(
          absl::StrFormat("run \"%s\": last outcome: no step was consumed yet", session->run));
    }
    return ToJson(muond::ToProto(*last));
  });
}

int32_t muond_session_rejoin(muond_session* session, muond_error** error) {
  return WithSession(session, error, [&] { return session->session->Rejoin(); });
}

int32_t muond_session_raise_generation(muond_session* session, const char* reason,
                                       size_t reason_bytes, muond_error** error) {
  return WithSession(session, error, [&] {
    return session->session->RaiseGeneration(Text(reason, reason_bytes));
  });
}

int32_t muond_session_initialize(muond_session* session, const muond_source* values, size_t count,
                                 int32_t* complete, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto sources, Sources("initialize", values, count));
    MUOND_ASSIGN_OR_RETURN(const bool all, session->session->Initialize(sources));
    if (complete != nullptr) *complete = all ? 1 : 0;
    return absl::OkStatus();
  });
}

int32_t muond_session_reinitialize(muond_session* session, const muond_source* values, size_t count,
                                   const char* reason, size_t reason_bytes, int32_t* complete,
                                   muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto sources, Sources("reinitialize", values, count));
    MUOND_ASSIGN_OR_RETURN(const bool all, session->session->Reinitialize(
                                               sources, Text(reason, reason_bytes)));
    if (complete != nullptr) *complete = all ? 1 : 0;
    return absl::OkStatus();
  });
}

int32_t muond_session_pull(muond_session* session, int64_t version, const muond_sink* sinks,
                           size_t count, int32_t masters, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto into, Sinks("pull", sinks, count));
    return session->session->Pull(version, into, masters != 0);
  });
}

}  // extern "C"
