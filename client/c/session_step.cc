// The steps of muond.h.
#include <vector>

#include "client/c/convert.h"
#include "client/c/handles.h"
#include "proto/check.h"
#include "proto/convert.h"

namespace muond::c {
namespace {

absl::StatusOr<StepBegin> Begin(const client::Session& session, const muond_begin* given) {
  MUOND_ASSIGN_OR_RETURN(const muond_begin read, ReadStruct("begin", given));
  v1::BeginRequest request;
  if (read.hyperparameters_bytes > 0) {
    MUOND_RETURN_IF_ERROR(FromJson("hyperparameters",
                                   Text(read.hyperparameters, read.hyperparameters_bytes),
                                   &request));
  }
  request.set_step(read.step < 0 || given == nullptr ? session.next_step() : read.step);
  request.set_loss_scale(read.loss_scale == 0 ? session.loss_scale() : read.loss_scale);
  request.set_micro_batches(read.micro_batches);
  return FromProto(request);
}

absl::StatusOr<std::vector<std::string>> Names(const muond_names* names) {
  std::vector<std::string> read;
  if (names == nullptr || names->count == 0) return read;
  MUOND_RETURN_IF_ERROR(CheckThere("absent: names", names->names));
  MUOND_RETURN_IF_ERROR(CheckThere("absent: bytes", names->bytes));
  for (size_t i = 0; i < names->count; ++i) {
    read.push_back(Text(names->names[i], names->bytes[i]));
  }
  return read;
}

absl::Status Give(const StepOutcome& outcome, muond_outcome* out) {
  if (out == nullptr) return absl::OkStatus();
  muond_outcome value{};
  value.step = outcome.step;
  value.version = outcome.version;
  value.applied_steps = outcome.applied_steps;
  value.skipped_steps = outcome.skipped_steps;
  value.consecutive_skips = outcome.consecutive_skips;
  value.newton_schulz_calls = outcome.newton_schulz_calls;
  value.newton_schulz_fallbacks = outcome.newton_schulz_fallbacks;
  value.zero_inputs = outcome.zero_inputs;
  value.nonfinite_elements = outcome.nonfinite_elements;
  value.loss_scale = outcome.loss_scale;
  value.next_loss_scale = outcome.next_loss_scale;
  value.grad_norm = outcome.grad_norm;
  value.clip_coefficient = outcome.clip_coefficient;
  value.applied = outcome.applied ? 1 : 0;
  value.cause = static_cast<int32_t>(ToProto(outcome.cause));
  return WriteStruct("outcome", value, out);
}

}  // namespace
}  // namespace muond::c

using namespace muond::c;  // NOLINT: what follows is the C side of that namespace

extern "C" {

int32_t muond_session_step(muond_session* session, const muond_begin* begin,
                           const muond_source* gradients, size_t count, const muond_names* absent,
                           muond_outcome* outcome, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto terms, Begin(*session->session, begin));
    MUOND_ASSIGN_OR_RETURN(const auto sources, Sources("push", gradients, count));
    MUOND_ASSIGN_OR_RETURN(const auto names, Names(absent));
    MUOND_ASSIGN_OR_RETURN(const auto result, session->session->Step(terms, sources, names));
    return Give(result, outcome);
  });
}

int32_t muond_session_step_and_pull(muond_session* session, const muond_begin* begin,
                                    const muond_source* gradients, size_t count,
                                    const muond_names* absent, const muond_sink* sinks,
                                    size_t sink_count, muond_outcome* outcome,
                                    muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto terms, Begin(*session->session, begin));
    MUOND_ASSIGN_OR_RETURN(const auto sources, Sources("push", gradients, count));
    MUOND_ASSIGN_OR_RETURN(const auto names, Names(absent));
    MUOND_ASSIGN_OR_RETURN(const auto into, Sinks("pull", sinks, sink_count));
    MUOND_ASSIGN_OR_RETURN(const auto result,
                           session->session->StepAndPull(terms, sources, into, names));
    return Give(result, outcome);
  });
}

int32_t muond_session_begin(muond_session* session, const muond_begin* begin,
                            muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto terms, Begin(*session->session, begin));
    return session->session->Begin(terms);
  });
}

int32_t muond_session_push(muond_session* session, const muond_source* gradients, size_t count,
                           muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto sources, Sources("push", gradients, count));
    return session->session->Push(sources);
  });
}

int32_t muond_session_finish(muond_session* session, const muond_names* absent,
                             muond_outcome* outcome, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto names, Names(absent));
    MUOND_ASSIGN_OR_RETURN(const auto result, session->session->Finish(names));
    return Give(result, outcome);
  });
}

int32_t muond_session_finish_and_pull(muond_session* session, const muond_names* absent,
                                      const muond_sink* sinks, size_t sink_count,
                                      muond_outcome* outcome, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto names, Names(absent));
    MUOND_ASSIGN_OR_RETURN(const auto into, Sinks("pull", sinks, sink_count));
    MUOND_ASSIGN_OR_RETURN(const auto result, session->session->FinishAndPull(into, names));
    return Give(result, outcome);
  });
}

int32_t muond_session_skip(muond_session* session, int32_t cause, double loss_scale,
                           muond_outcome* outcome, muond_error** error) {
  return WithSession(session, error, [&]() -> absl::Status {
    MUOND_ASSIGN_OR_RETURN(const auto read,
                           muond::FromProto(static_cast<muond::v1::SkipCause>(cause)));
    MUOND_ASSIGN_OR_RETURN(const auto result, session->session->Skip(read, loss_scale));
    return Give(result, outcome);
  });
}

}  // extern "C"
