// The addition of parameters of muond.h.
#include "absl/strings/str_format.h"
#include "client/c/convert.h"
#include "client/c/handles.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::c {
namespace {

absl::StatusOr<ParameterAddition> Addition(const std::string& json) {
  v1::AddParametersRequest request;
  MUOND_RETURN_IF_ERROR(FromJson("addition", json, &request));
  if (request.has_id() || request.rank() != 0 || request.first() != 0 || request.wait_ms() != 0) {
    return absl::InvalidArgumentError(
        "addition: expected groups, parameters and slices; id, rank, first and waitMs are the "
        "session's");
  }
  ParameterAddition addition;
  for (const v1::Group& group : request.groups()) {
    MUOND_ASSIGN_OR_RETURN(addition.groups.emplace_back(), FromProto(group));
  }
  for (const v1::Parameter& parameter : request.parameters()) {
    MUOND_ASSIGN_OR_RETURN(addition.parameters.emplace_back(), FromProto(parameter));
  }
  MUOND_ASSIGN_OR_RETURN(addition.slices, SlicesFromProto(request.slices()));
  return addition;
}

absl::Status Add(muond_session& session, const std::string& json) {
  MUOND_ASSIGN_OR_RETURN(const ParameterAddition addition, Addition(json));
  absl::Status added = session.session->AddParameters(addition);
  if (!absl::IsUnimplemented(added)) return added;
  return absl::UnimplementedError(absl::StrFormat(
      "run \"%s\": add parameters: a daemon is older than this client, %s, and does not know of "
      "that",
      session.run, MUOND_VERSION));
}

}  // namespace
}  // namespace muond::c

using namespace muond::c;  // NOLINT: what follows is the C side of that namespace

extern "C" {

int32_t muond_session_add_parameters(muond_session* session, const char* addition,
                                     size_t addition_bytes, muond_error** error) {
  return WithSession(session, error, [&] { return Add(*session, Text(addition, addition_bytes)); });
}

}  // extern "C"
