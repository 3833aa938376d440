// The checkpoints of muond.h.
#include "client/c/convert.h"
#include "client/c/handles.h"
#include "proto/check.h"

using namespace muond::c;  // NOLINT: what follows is the C side of that namespace

extern "C" {

int32_t muond_session_save(muond_session* session, muond_text** json, muond_error** error) {
  return WithText(session, json, error,
                  [&] { return Json(session->checkpoints->SaveCheckpoint(session->run)); });
}

int32_t muond_session_restore(muond_session* session, const char* name, size_t name_bytes,
                              int32_t allow_relayout, muond_text** json, muond_error** error) {
  return WithText(session, json, error, [&]() -> absl::StatusOr<std::string> {
    MUOND_ASSIGN_OR_RETURN(const auto reply,
                           session->checkpoints->RestoreCheckpoint(
                               session->run, Text(name, name_bytes), allow_relayout != 0));
    MUOND_RETURN_IF_ERROR(session->session->Rejoin());
    return ToJson(reply);
  });
}

int32_t muond_session_await_restore(muond_session* session, double timeout, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    if (!(timeout > 0)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("await restore: timeout: expected more than 0 seconds, got %g", timeout));
    }
    return session->session->AwaitRestore(absl::Seconds(timeout));
  });
}

}  // extern "C"
