#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/version.h"
#include "server/rpc/answer.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/tenant.h"
#include "server/rpc/transport_choice.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// Where a parameter's state lives, in words: one daemon, or the range of those that share it.
std::string OwnerOf(const Run& run, const Registry& registry, int parameter) {
  const Plan& plan = registry.plan();
  const auto& daemons = run.daemons();
  std::vector<std::string> names;
  for (const Shard& shard : plan.ShardsOf(registry.routing().parameters[parameter].state)) {
    const std::string& name = daemons[plan.owners[shard.owner].place.daemon];
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return absl::StrJoin(names, ", ");
}

// Of the first `known` parameters: what a trainer that has restarted has still to add it hears of
// when it does.
void FillPlan(const Run& run, const Registry& registry, int known, v1::RegisterReply* reply) {
  const Plan& plan = registry.plan();
  reply->set_plan_hash(plan.hash);
  for (const std::int64_t border : registry.spec().additions) {
    if (border < known) reply->add_additions(border);
  }
  if (run.daemons().size() == 1) return;
  for (const std::string& daemon : run.daemons()) reply->add_daemons(daemon);
  reply->set_daemon(run.daemon());
  for (const Shard& shard : plan.shards) {
    if (shard.parameter >= known) break;
    v1::Shard* message = reply->add_shards();
    message->set_parameter(shard.parameter);
    message->set_first(shard.first);
    message->set_elements(shard.elements);
    message->set_daemon(plan.owners[shard.owner].place.daemon);
  }
}

void FillRouting(const Run& run, const Registry& registry, int known, const std::string& owner,
                 v1::RoutingReport* report) {
  const bool alone = run.daemons().size() == 1;
  const Routing& routing = registry.routing();
  const auto& parameters = registry.spec().parameters;
  for (int i = 0; i < known; ++i) {
    const RoutedParameter& routed = routing.parameters[i];
    const bool tied = routed.state != i;
    *report->add_parameters() =
        ToProto(routed, parameters[i].group, tied ? parameters[routed.state].name : "",
                alone ? owner : OwnerOf(run, registry, i));
  }
  report->set_muon_parameters(routing.muon_parameters);
  report->set_adamw_parameters(routing.adamw_parameters);
  report->set_muon_matrices(routing.muon_matrices);
  for (const std::string& pattern : routing.unmatched_rules) report->add_unmatched_rules(pattern);
}

void LogJoin(const Run& run, const v1::RegisterRequest& request, const v1::RegisterReply& reply) {
  spdlog::info(
      "run \"{}\": rank {} of {} {} ({}): {} parameters on Muon ({} matrices), {} on AdamW; "
      "transport {} ({})",
      run.name(), request.rank(), run.spec().world_size, reply.rejoined() ? "rejoined" : "joined",
      request.client().empty() ? "unnamed client" : request.client(),
      reply.routing().muon_parameters(), reply.routing().muon_matrices(),
      reply.routing().adamw_parameters(), reply.transport(), reply.transport_reason());
  if (reply.rejoined()) return;
  for (const auto& routed : reply.routing().parameters()) {
    spdlog::debug("run \"{}\": \"{}\" -> {}: {}", run.name(), routed.name(),
                  routed.algorithm() == v1::ALGORITHM_MUON ? "muon" : "adamw", routed.reason());
  }
}

// Before anything else of the request is read: another version may mean something else by it.
absl::Status CheckClient(const v1::RegisterRequest& request) {
  absl::Status checked = CheckVersions(
      OwnVersion(), request.version(),
      absl::StrFormat("register: rank %d: client \"%s\"", request.rank(), request.client()));
  if (!checked.ok()) spdlog::warn("{}", std::string(checked.message()));
  return checked;
}

absl::Status Join(const RpcContext& context, const grpc::CallbackServerContext& call,
                  const v1::RegisterRequest& request, v1::RegisterReply* reply) {
  MUOND_RETURN_IF_ERROR(CheckClient(request));
  MUOND_ASSIGN_OR_RETURN(const RunSpec spec, FromProto(request.run()));
  MUOND_ASSIGN_OR_RETURN(const RankSlices slices, SlicesFromProto(request.slices()));
  const std::string session =
      request.session().empty() ? absl::StrFormat("rank-%d", request.rank()) : request.session();
  MUOND_RETURN_IF_ERROR(ValidateName("session", session));
  MUOND_ASSIGN_OR_RETURN(const TransportChoice transport,
                         ChooseTransport({.peer = call.peer(),
                                          .boot_id = context.boot_id,
                                          .arena_socket = context.arena_socket,
                                          .why_no_arenas = context.why_no_arenas,
                                          .pid_namespace = context.pid_namespace,
                                          .gpus = context.gpus,
                                          .host_backend = context.backend != "cuda",
                                          .pairs = context.pairs},
                                         request));
  auto joined = context.runs->Join(spec, request.rank(), session, slices, TenantOf(call));
  if (!joined.ok()) {
    spdlog::warn("register refused: {}", std::string(joined.status().message()));
    return joined.status();
  }
  const Run& run = *joined->run;
  // Of one moment: a step may end in between, and its scale is another.
  const RunPosition position = run.Position();
  *reply->mutable_position() = ToProto(position);
  const Registry& registry = run.registry();
  const auto known = static_cast<int>(spec.parameters.size());
  FillRouting(run, registry, known, context.daemon_name, reply->mutable_routing());
  FillPlan(run, registry, known, reply);
  reply->set_loss_scale(position.loss_scale);
  reply->set_devices(run.devices());
  reply->set_version(std::string(OwnVersion()));
  reply->set_max_chunk_bytes(context.max_chunk_bytes);
  context.metrics->OnTransportChoice(transport.path);
  if (transport.fallback) {
    context.metrics->OnTransportFallback(*transport.fallback, transport.instead_of);
  }
  for (const auto& [name, obstacle] : transport.offers) {
    v1::TransportOffer* offer = reply->add_offers();
    offer->set_transport(name);
    offer->set_obstacle(obstacle);
  }
  for (const kernels::DeviceMemory* gpu : context.gpus) {
    reply->add_gpus(std::string(gpu->uuid()));
  }
  reply->set_nccl_version(context.pairs->nccl_version());
  reply->set_transport(TransportName(transport.path));
  reply->set_transport_reason(transport.reason);
  reply->set_rejoined(joined->reply.rejoined);
  for (std::int64_t rank : joined->reply.missing_ranks) reply->add_missing_ranks(rank);
  LogJoin(run, request, *reply);
  return absl::OkStatus();
}

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::Register(grpc::CallbackServerContext* context,
                                                     const v1::RegisterRequest* request,
                                                     v1::RegisterReply* reply) {
  if (context_.peers->count() == 1) {
    return AnswerNow(context, Join(context_, *context, *request, reply), nullptr);
  }
  // Making a run asks the other daemons what they know of it, which may take its time.
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  context_.peer_executor->Post([this, context, reactor, request, reply] {
    reactor->Finish(
        Answer(context, Join(context_, *context, *request, reply), nullptr));
  });
  return reactor;
}

}  // namespace muond
