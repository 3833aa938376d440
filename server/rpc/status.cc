#include <unistd.h>

#include "proto/convert.h"
#include "proto/steady_time.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"

namespace muond {
namespace {

void Fill(const RunSnapshot& run, v1::RunStatus* message) {
  message->set_run(run.name);
  *message->mutable_position() = ToProto(run.position);
  message->set_overlap(run.overlap);
  message->set_loss_scale(run.position.loss_scale);
  message->set_world_size(run.world_size);
  for (std::int64_t rank : run.ranks_registered) message->add_ranks_registered(rank);
  message->set_muon_parameters(run.muon_parameters);
  message->set_adamw_parameters(run.adamw_parameters);
  message->set_muon_matrices(run.muon_matrices);
  message->set_elements(run.elements);
  message->set_steps_applied(run.totals.steps_applied);
  for (const auto& [cause, count] : run.totals.steps_skipped) {
    (*message->mutable_steps_skipped())[cause] = count;
  }
  message->set_newton_schulz_calls(run.totals.newton_schulz_calls);
  message->set_newton_schulz_fallbacks(run.totals.newton_schulz_fallbacks);
  message->set_state_nonfinite(run.totals.state_nonfinite);
  message->set_momentum_nonfinite(run.totals.momentum_nonfinite);
  message->set_grad_norm(run.grad_norm);
  message->set_momentum_norm(run.totals.momentum_norm);
  message->set_step_in_flight(run.step_in_flight);
  message->set_step_in_flight_seconds(run.step_in_flight_seconds);
  for (std::int64_t rank : run.waiting_ranks) message->add_waiting_ranks(rank);
  message->set_waiting_slices(run.waiting_slices);
  message->set_state_bytes(run.state_bytes);
  message->set_staging_bytes(run.staging_bytes);
  message->set_failure(run.failure.empty() ? run.why_restore : run.failure);
  if (run.daemons.size() > 1) {
    for (const std::string& daemon : run.daemons) message->add_daemons(daemon);
  }
  message->set_daemon(run.daemon);
  message->set_plan_hash(run.plan_hash);
  for (const int daemon : run.missing_votes) message->add_missing_votes(daemon);
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::Status(grpc::CallbackServerContext* context,
                                                   const v1::StatusRequest* request,
                                                   v1::StatusReply* reply) {
  reply->set_version(context_.version);
  reply->set_backend(context_.backend);
  reply->set_backend_description(context_.backend_description);
  reply->set_uptime_seconds(absl::ToDoubleSeconds(SteadyNow() - context_.started));
  reply->set_pid(getpid());
  if (!request->run().empty()) {
    const auto run = FindRun(*context, *context_.runs, request->run());
    if (!run.ok()) return AnswerNow(context, run.status(), nullptr);
    Fill((*run)->Snapshot(), reply->add_runs());
  } else {
    for (const auto& run : context_.runs->All()) {
      const bool shown = FindRun(*context, *context_.runs, run->name()).ok();
      if (shown) Fill(run->Snapshot(), reply->add_runs());
    }
  }
  return AnswerNow(context, absl::OkStatus(), nullptr);
}

}  // namespace muond
