#include "server/daemon/embedded.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "grpcpp/health_check_service_interface.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/status.h"
#include "proto/steady_time.h"
#include "server/daemon/backends.h"
#include "server/daemon/build_info.h"
#include "server/daemon/service_impl.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

absl::StatusOr<Backends> MakeBackends(const ServiceOptions& options,
                                      kernels::NewtonSchulzFault* fault) {
  const BackendChoice choice{.backend = options.backend,
                             .devices = options.devices,
                             .cpu_products = options.cpu_products,
                             .options = {.threads = options.threads, .newton_schulz_fault = fault}};
  if (options.make_backends == nullptr) return MakeBackends(choice);
  Backends backends{.list = options.make_backends(choice.options), .why = "made by a test"};
  backends.models.resize(backends.list.size());
  if (options.make_memories != nullptr) backends.memories = options.make_memories();
  return backends;
}

// What Status tells: one line for each device.
std::string DescriptionOf(const std::vector<std::unique_ptr<kernels::Backend>>& backends) {
  std::vector<std::string> lines;
  for (const auto& backend : backends) lines.push_back(backend->description());
  return absl::StrJoin(lines, "; ");
}

RegistryLimits LimitsOf(const ServiceOptions& options) {
  return {.parameters_max = options.max_parameters,
          .tensor_bytes_max = options.max_tensor_bytes,
          .run_bytes_max = options.max_run_bytes,
          .world_size_max = options.max_world_size};
}

// As the daemons of a run call this one, or where it listens.
std::string NameOf(const Peers& peers, const ServiceOptions& options) {
  if (peers.count() > 1) return peers.daemons()[peers.self()];
  return options.listen.empty() ? "in-process" : options.listen.front();
}

// Makes the directory where it is missing.
absl::Status PrepareStateDirectory(const std::string& directory) {
  if (directory.empty()) return absl::OkStatus();
  if (mkdir(directory.c_str(), 0700) == 0) return absl::OkStatus();
  struct stat info;
  if (stat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
      access(directory.c_str(), W_OK | X_OK) != 0) {
    return absl::UnavailableError(absl::StrFormat(
        "state-dir \"%s\": no directory that this user may write to", directory));
  }
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<AdminService> Service::Impl::MakeAdminService(
    const std::vector<ServiceSetting>& settings) {
  AdminContext context{.runs = runs.get(), .events = &events};
  for (const ServiceSetting& setting : settings) {
    v1::Setting* message = context.settings.add_settings();
    message->set_name(setting.name);
    for (const std::string& value : setting.values) message->add_values(value);
    message->set_source(setting.source);
  }
  context.set_ready = [this](bool ready) {
    metrics->SetReady(ready);
    auto* health = server->GetHealthCheckService();
    if (health != nullptr) health->SetServingStatus("readiness", ready);
  };
  return std::make_unique<AdminService>(std::move(context));
}

void Service::Impl::ListenForLoss(const ServiceOptions& options) {
  for (const auto& backend : backends) backend->OnLost(options.on_device_lost);
  for (const auto& memory : memories) {
    if (memory != nullptr) memory->OnLost(options.on_device_lost);
  }
}

void Service::Impl::WatchQueues() {
  metrics->SetQueueDepth([this](QueueKind queue) {
    if (queue == QueueKind::kPeer) return static_cast<double>(peer_executor->queued());
    double jobs = 0;
    for (const auto& executor : executors) jobs += static_cast<double>(executor->queued());
    return jobs;
  });
}

absl::Status Service::Impl::MakeRuns(const ServiceOptions& options,
                                     std::vector<EngineDevice> devices) {
  RunContext context{.devices = std::move(devices),
                     .faults = {&faults, &newton_schulz_fault},
                     .metrics = metrics.get(),
                     .limits = LimitsOf(options),
                     .peers = peers,
                     .peer_executor = peer_executor.get(),
                     .state_dir = options.state_dir,
                     .overlap = options.overlap,
                     .observe = {.daemon = NameOf(*peers, options),
                                 .events = &events,
                                 .diagnostics_every = options.diagnostics_every,
                                 .summary_every = options.summary_every}};
  MUOND_RETURN_IF_ERROR(OpenCheckpoints(options, context));
  runs = std::make_unique<RunTable>(context, options.max_runs);
  if (checkpointer != nullptr) checkpointer->Start(runs.get());
  return absl::OkStatus();
}

absl::Status Service::Impl::OpenCheckpoints(const ServiceOptions& options, RunContext& context) {
  const bool buddies = options.buddy_steps > 0 && peers->count() > 1;
  context.buddy_steps = options.buddy_steps;
  if (options.checkpoint_dir.empty() && !buddies) return absl::OkStatus();
  MUOND_ASSIGN_OR_RETURN(checkpointer,
                         Checkpointer::Open({.directory = options.checkpoint_dir,
                                             .every_steps = options.checkpoint_every_steps,
                                             .every = options.checkpoint_every,
                                             .keep = options.checkpoint_keep,
                                             .restore = options.restore,
                                             .writer = "muond " + ThisBuild().version},
                                            peers));
  // Without a directory, copies that nobody writes.
  if (!options.checkpoint_dir.empty()) {
    context.checkpoint_every_steps = options.checkpoint_every_steps;
  }
  context.checkpoint_wanted = [this] { checkpointer->Wake(); };
  context.run_made = [this](Run& run) { checkpointer->OnMade(run); };
  return absl::OkStatus();
}

void Service::Impl::MakeStateServices() {
  peer_service = std::make_unique<PeerService>(runs.get());
  checkpoint_service = std::make_unique<CheckpointService>(runs.get(), checkpointer.get());
  checkpoint_peer_service = std::make_unique<CheckpointPeerService>(runs.get(), checkpointer.get());
  buddy_service = std::make_unique<BuddyService>(runs.get(), buddy_executor.get());
}

absl::StatusOr<std::unique_ptr<Service>> Service::Start(const ServiceOptions& options) {
  MUOND_RETURN_IF_ERROR(PrepareStateDirectory(options.state_dir));
  auto impl = std::make_unique<Impl>();
  MUOND_RETURN_IF_ERROR(impl->faults.ArmFromSpec(options.fault_points));
  MUOND_ASSIGN_OR_RETURN(Backends backends, MakeBackends(options, &impl->newton_schulz_fault));
  impl->backends = std::move(backends.list);
  impl->memories = std::move(backends.memories);
  impl->memories.resize(impl->backends.size());
  impl->ListenForLoss(options);
  impl->host_memory = kernels::MakeHostDeviceMemory();
  impl->metrics = std::make_unique<DaemonMetrics>(
      ThisBuild(), BackendInfo{.backend = std::string(impl->backends[0]->name()),
                               .models = backends.models,
                               .device_memory = !impl->backends[0]->host_memory()});
  std::vector<EngineDevice> devices;
  for (std::size_t i = 0; i < impl->backends.size(); ++i) {
    impl->executors.push_back(std::make_unique<Executor>());
    devices.push_back(
        {impl->backends[i].get(), impl->executors.back().get(), impl->memories[i].get()});
  }
  MUOND_ASSIGN_OR_RETURN(const PeerList peers,
                         ResolvePeers({.peers = options.peers,
                                       .advertise = options.advertise,
                                       .listen = options.listen,
                                       .daemons_expected = options.peers_expected}));
  MUOND_ASSIGN_OR_RETURN(const ChannelSecurity security, MakeChannelSecurity(TlsOf(options)));
  impl->peers = std::make_shared<Peers>(peers, options.peer_patience, security);
  impl->peer_executor = std::make_unique<Executor>();
  impl->buddy_executor = std::make_unique<Executor>();
  MUOND_RETURN_IF_ERROR(impl->MakeRuns(options, std::move(devices)));
  impl->PreparePaths(options);
  impl->service = std::make_unique<OptimizerService>(
      RpcContext{.runs = impl->runs.get(),
                 .metrics = impl->metrics.get(),
                 .peers = impl->peers,
                 .peer_executor = impl->peer_executor.get(),
                 .faults = &impl->faults,
                 .arenas = impl->arenas.get(),
                 .arena_socket = impl->arena_path,
                 .why_no_arenas = impl->why_no_arenas,
                 .boot_id = BootId(),
                 .pid_namespace = PidNamespace(),
                 .gpus = impl->Gpus(),
                 .host_memory = impl->host_memory.get(),
                 .pairs = impl->pairs.get(),
                 .max_chunk_bytes = options.max_chunk_bytes,
                 .step_deadline = options.step_deadline,
                 .version = ThisBuild().version,
                 .backend = std::string(impl->backends[0]->name()),
                 .backend_description = DescriptionOf(impl->backends),
                 .daemon_name = options.listen.empty() ? "in-process" : options.listen.front(),
                 .started = SteadyNow()});
  impl->MakeStateServices();
  impl->admin_service = impl->MakeAdminService(options.settings);
  impl->WatchQueues();
  MUOND_RETURN_IF_ERROR(impl->Listen(options));
  MUOND_RETURN_IF_ERROR(impl->ListenForProbes(options.health_address));
  if (!options.metrics_address.empty()) {
    MUOND_ASSIGN_OR_RETURN(impl->metrics_server,
                           MetricsServer::Start(options.metrics_address, impl->metrics.get()));
  }
  impl->SetServing(true);
  for (const auto& backend : impl->backends) {
    spdlog::info("backend {} ({}): {}", std::string(backend->name()), backends.why,
                 backend->description());
  }
  return std::unique_ptr<Service>(new Service(std::move(impl)));
}

Service::Service(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Service::~Service() { Stop(absl::ZeroDuration()); }

std::shared_ptr<grpc::Channel> Service::channel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return impl_->server->InProcessChannel(arguments);
}

const std::vector<std::string>& Service::addresses() const { return impl_->addresses; }

std::string Service::metrics_address() const {
  return impl_->metrics_server == nullptr ? "" : impl_->metrics_server->address();
}

std::int64_t Service::FaultsFired(std::string_view point) const {
  for (const FaultPointInfo& info : FaultPoints()) {
    if (info.name == point) return impl_->faults.fired(info.point);
  }
  MUOND_CHECK(false, "no such fault point");
  return 0;
}

void Service::OnLogMessage(std::string_view level) {
  const auto& levels = RowOf(MetricId::kLogMessages).labels[0].values;
  const auto found = std::find(levels.begin(), levels.end(), level);
  if (found == levels.end()) return;
  impl_->metrics->OnLogMessage(static_cast<LogSeverity>(found - levels.begin()));
}

std::string Service::health_address() const { return impl_->health_address; }

std::string Service::Metrics() { return impl_->metrics->Serialize(); }

absl::Status Service::CheckAlive(absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadlineIn(timeout));
  v1::StatusReply reply;
  return FromGrpc(v1::Optimizer::NewStub(channel())->Status(&context, v1::StatusRequest(), &reply));
}

void Service::Stop(absl::Duration grace) {
  if (impl_->stopped) return;
  impl_->stopped = true;
  impl_->SetServing(false);
  impl_->events.Close();  // watchers would wait for ever
  // Calls in flight end by themselves or are cancelled when the grace is over; only then may runs
  // and the executor go.
  impl_->runs->Drain(absl::UnavailableError("the daemon is shutting down: try again later"));
  if (impl_->checkpointer != nullptr && grace > absl::ZeroDuration()) {
    impl_->checkpointer->SaveAll(grace / 2);
  }
  // Their calls last as long as they do, and would use up the grace.
  impl_->pairs->CloseAll(absl::UnavailableError("the daemon is shutting down: try again later"));
  if (impl_->unix_listener != nullptr) impl_->unix_listener->Stop();
  impl_->server->Shutdown(GrpcDeadlineIn(grace));
  impl_->server->Wait();
  if (impl_->health_server != nullptr) impl_->health_server->Shutdown();
  impl_->arena_socket.reset();
  impl_->metrics_server.reset();
  if (impl_->checkpointer != nullptr) impl_->checkpointer->Stop();
  impl_->peer_executor.reset();
  impl_->buddy_executor.reset();
  StopAll(impl_->executors);
  impl_->runs.reset();
  impl_->unix_listener.reset();
}

}  // namespace muond
