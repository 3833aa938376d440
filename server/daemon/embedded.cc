#include "server/daemon/embedded.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "proto/check.h"
#include "proto/status.h"
#include "server/daemon/backends.h"
#include "server/daemon/build_info.h"
#include "server/daemon/secure_listen.h"
#include "server/metrics/metrics_server.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/checkpoint_service.h"
#include "server/rpc/metrics_interceptor.h"
#include "server/rpc/optimizer_service.h"
#include "server/rpc/peer_service.h"
#include "server/transport/arena_socket.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// A registration of a hundred thousand parameters takes some tens of megabytes; a chunk's own limit
// is checked where its parameter can be named.
constexpr std::int64_t kMessageBytesMax = 64 << 20;
constexpr std::int64_t kHeaderBytes = 64 << 10;  // the fields of a chunk beside its payload
constexpr char kUnixPrefix[] = "unix:";
constexpr std::size_t kUnixPathBytesMax = 107;

absl::StatusOr<Backends> MakeBackends(const ServiceOptions& options,
                                      kernels::NewtonSchulzFault* fault) {
  const BackendChoice choice{.backend = options.backend,
                             .devices = options.devices,
                             .cpu_products = options.cpu_products,
                             .options = {.threads = options.threads, .newton_schulz_fault = fault}};
  if (options.make_backends == nullptr) return MakeBackends(choice);
  Backends backends{.list = options.make_backends(choice.options), .why = "made by a test"};
  backends.models.resize(backends.list.size());
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

// "unix:///run/muond.sock" and "unix:/run/muond.sock" -> "/run/muond.sock".
std::string UnixPath(const std::string& address) {
  std::string path = address.substr(sizeof(kUnixPrefix) - 1);
  while (absl::StartsWith(path, "//")) path.erase(0, 1);
  return path;
}

// Whether a process accepts connections there: gRPC would unlink its socket without asking.
bool SomebodyListens(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX};
  if (path.size() >= sizeof(address.sun_path)) return false;  // bind will say so
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const int result = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const bool listens = result == 0 || errno == EAGAIN;  // EAGAIN: its queue is full
  close(fd);
  return listens;
}

// A socket file left by a daemon that died would make bind fail; one that a living daemon listens
// on must not be taken from it.
absl::Status PrepareSocket(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  if (!parent.empty() && access(parent.c_str(), W_OK | X_OK) != 0) {
    return absl::UnavailableError(absl::StrFormat(
        "listen on unix:%s: cannot create a socket in %s: choose another place with --listen", path,
        parent.string()));
  }
  struct stat info;
  if (lstat(path.c_str(), &info) == 0 && !S_ISSOCK(info.st_mode)) {
    return absl::UnavailableError(
        absl::StrFormat("listen on unix:%s: a file that is no socket is in the way", path));
  }
  if (SomebodyListens(path)) {
    return absl::UnavailableError(
        absl::StrFormat("listen on unix:%s: cannot bind: another daemon listens there", path));
  }
  return absl::OkStatus();
}

// `address` with the port that was bound, where it asked for any.
std::string BoundAddress(const std::string& address, int port) {
  if (absl::StartsWith(address, kUnixPrefix) || !absl::EndsWith(address, ":0")) return address;
  return absl::StrFormat("%s:%d", address.substr(0, address.rfind(':')), port);
}

TlsFiles TlsOf(const ServiceOptions& options) {
  return {.certificate = options.tls_cert,
          .key = options.tls_key,
          .authority = options.tls_ca,
          .server_name = options.tls_server_name,
          .refresh = options.tls_refresh};
}

}  // namespace

// In the order of construction; destroyed in reverse, the executors' threads before what they use.
struct Service::Impl {
  kernels::NewtonSchulzFault newton_schulz_fault;
  std::vector<std::unique_ptr<kernels::Backend>> backends;  // one per device
  FaultInjector faults;
  std::unique_ptr<DaemonMetrics> metrics;
  StepEvents events;
  std::unique_ptr<ArenaTable> arenas;
  std::string arena_path, why_no_arenas;  // one of them is empty
  std::unique_ptr<RunTable> runs;
  std::vector<std::unique_ptr<Executor>> executors;  // one per device
  std::shared_ptr<Peers> peers;
  std::unique_ptr<Executor> peer_executor;
  std::unique_ptr<OptimizerService> service;
  std::unique_ptr<PeerService> peer_service;
  std::unique_ptr<AdminService> admin_service;
  std::unique_ptr<Checkpointer> checkpointer;  // null: no checkpoints
  std::unique_ptr<CheckpointService> checkpoint_service;
  std::unique_ptr<CheckpointPeerService> checkpoint_peer_service;
  std::unique_ptr<ArenaSocket> arena_socket;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<grpc::Server> health_server;
  std::string health_address;
  std::unique_ptr<MetricsServer> metrics_server;
  std::vector<std::string> addresses;
  std::vector<std::string> socket_paths;
  bool stopped = false;

  absl::Status OpenCheckpoints(const ServiceOptions& options, RunContext& context);
  void PrepareArenas(const ServiceOptions& options);
  absl::Status Listen(const ServiceOptions& options);
  absl::Status ListenForProbes(const std::string& address);
  void SetServing(bool serving);
  std::unique_ptr<AdminService> MakeAdminService(const std::vector<ServiceSetting>& settings);
  void WatchQueues();
};

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

void Service::Impl::WatchQueues() {
  metrics->SetQueueDepth([this](QueueKind queue) {
    if (queue == QueueKind::kPeer) return static_cast<double>(peer_executor->queued());
    double jobs = 0;
    for (const auto& executor : executors) jobs += static_cast<double>(executor->queued());
    return jobs;
  });
}

absl::Status Service::Impl::OpenCheckpoints(const ServiceOptions& options, RunContext& context) {
  if (options.checkpoint_dir.empty()) return absl::OkStatus();
  MUOND_ASSIGN_OR_RETURN(checkpointer,
                         Checkpointer::Open({.directory = options.checkpoint_dir,
                                             .every_steps = options.checkpoint_every_steps,
                                             .every = options.checkpoint_every,
                                             .keep = options.checkpoint_keep,
                                             .restore = options.restore,
                                             .writer = "muond " + ThisBuild().version},
                                            peers));
  context.checkpoint_every_steps = options.checkpoint_every_steps;
  context.checkpoint_wanted = [this] { checkpointer->Wake(); };
  context.run_made = [this](Run& run) { checkpointer->OnMade(run); };
  return absl::OkStatus();
}

void Service::Impl::SetServing(bool serving) {
  metrics->SetReady(serving);
  for (const auto* each : {&server, &health_server}) {
    auto* health = *each == nullptr ? nullptr : (*each)->GetHealthCheckService();
    if (health == nullptr) continue;
    for (const char* name : {"", "liveness", "readiness", "muond.v1.Optimizer"}) {
      health->SetServingStatus(name, serving || std::string(name) == "liveness");
    }
  }
}

absl::Status Service::Impl::ListenForProbes(const std::string& address) {
  if (address.empty()) return absl::OkStatus();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // One completion queue and one thread: a probe comes every few seconds.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  health_server = builder.BuildAndStart();
  if (health_server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrFormat(
        "listen for health probes on %s: cannot bind: is another daemon there?", address));
  }
  health_address = BoundAddress(address, port);
  return absl::OkStatus();
}

// Arenas are handed over beside the first unix socket.
void Service::Impl::PrepareArenas(const ServiceOptions& options) {
  const ArenaLimits limits{.bytes_max = options.max_arena_bytes, .count_max = options.max_arenas};
  arenas = std::make_unique<ArenaTable>(
      limits, [metrics = metrics.get()](std::int64_t attached, std::int64_t bytes) {
        metrics->SetArenas(attached, bytes);
      });
  if (options.max_arena_bytes == 0) {
    why_no_arenas = "the daemon shares no memory (--max-arena-bytes 0)";
    return;
  }
  why_no_arenas = "the daemon listens on no unix socket";
  for (const std::string& address : options.listen) {
    if (!absl::StartsWith(address, kUnixPrefix)) continue;
    const std::string path = std::filesystem::absolute(UnixPath(address)).string() + ".arena";
    if (path.size() > kUnixPathBytesMax) {
      why_no_arenas = absl::StrFormat("the path \"%s\" is too long for a socket", path);
      spdlog::warn("no memory is shared with trainers: {}", why_no_arenas);
      continue;
    }
    why_no_arenas.clear();
    arena_path = path;
    return;
  }
}

absl::Status Service::Impl::Listen(const ServiceOptions& options) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  MUOND_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ServerCredentials> tcp_credentials,
                         MakeServerCredentials(TlsOf(options)));
  grpc::ServerBuilder builder;
  // One port variable per address: a unix address sets its port to 1.
  std::vector<int> ports(options.listen.size(), 0);
  for (std::size_t i = 0; i < options.listen.size(); ++i) {
    const std::string& address = options.listen[i];
    if (absl::StartsWith(address, kUnixPrefix)) {
      const std::string path = UnixPath(address);
      MUOND_RETURN_IF_ERROR(PrepareSocket(path));
      socket_paths.push_back(path);
      builder.AddListeningPort(kUnixPrefix + path, grpc::InsecureServerCredentials(), &ports[i]);
    } else {
      builder.AddListeningPort(address, tcp_credentials, &ports[i]);
    }
  }
  if (!arena_path.empty()) {
    MUOND_ASSIGN_OR_RETURN(arena_socket, ArenaSocket::Listen(arena_path, arenas.get()));
  }
  builder.RegisterService(service.get());
  builder.RegisterService(admin_service.get());
  builder.RegisterService(checkpoint_service.get());
  if (peers->count() > 1) {
    builder.RegisterService(peer_service.get());
    builder.RegisterService(checkpoint_peer_service.get());
  }
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(std::max(options.max_chunk_bytes + kHeaderBytes, kMessageBytesMax)));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<MetricsInterceptorFactory>(metrics.get()));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server = builder.BuildAndStart();
  for (std::size_t i = 0; i < ports.size(); ++i) {
    const std::string& address = options.listen[i];
    if (server == nullptr || ports[i] == 0) {
      return absl::UnavailableError(
          absl::StrFormat("listen on %s: cannot bind: is another daemon there?", address));
    }
    addresses.push_back(BoundAddress(address, ports[i]));
  }
  if (server == nullptr) return absl::UnavailableError("start the gRPC server: it did not start");
  return absl::OkStatus();
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

absl::StatusOr<std::unique_ptr<Service>> Service::Start(const ServiceOptions& options) {
  MUOND_RETURN_IF_ERROR(PrepareStateDirectory(options.state_dir));
  auto impl = std::make_unique<Impl>();
  MUOND_RETURN_IF_ERROR(impl->faults.ArmFromSpec(options.fault_points));
  MUOND_ASSIGN_OR_RETURN(Backends backends, MakeBackends(options, &impl->newton_schulz_fault));
  impl->backends = std::move(backends.list);
  impl->metrics = std::make_unique<DaemonMetrics>(
      ThisBuild(), BackendInfo{.backend = std::string(impl->backends[0]->name()),
                               .models = backends.models,
                               .device_memory = !impl->backends[0]->host_memory()});
  std::vector<EngineDevice> devices;
  for (const auto& backend : impl->backends) {
    impl->executors.push_back(std::make_unique<Executor>());
    devices.push_back({backend.get(), impl->executors.back().get()});
  }
  MUOND_ASSIGN_OR_RETURN(const PeerList peers,
                         ResolvePeers({.peers = options.peers,
                                       .advertise = options.advertise,
                                       .listen = options.listen,
                                       .daemons_expected = options.peers_expected}));
  MUOND_ASSIGN_OR_RETURN(const ChannelSecurity security, MakeChannelSecurity(TlsOf(options)));
  impl->peers = std::make_shared<Peers>(peers, options.peer_patience, security);
  impl->peer_executor = std::make_unique<Executor>();
  RunContext context{.devices = std::move(devices),
                     .faults = {&impl->faults, &impl->newton_schulz_fault},
                     .metrics = impl->metrics.get(),
                     .limits = LimitsOf(options),
                     .peers = impl->peers,
                     .peer_executor = impl->peer_executor.get(),
                     .state_dir = options.state_dir,
                     .overlap = options.overlap,
                     .observe = {.daemon = NameOf(*impl->peers, options),
                                 .events = &impl->events,
                                 .diagnostics_every = options.diagnostics_every,
                                 .summary_every = options.summary_every}};
  MUOND_RETURN_IF_ERROR(impl->OpenCheckpoints(options, context));
  impl->runs = std::make_unique<RunTable>(context, options.max_runs);
  if (impl->checkpointer != nullptr) impl->checkpointer->Start(impl->runs.get());
  impl->PrepareArenas(options);
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
                 .max_chunk_bytes = options.max_chunk_bytes,
                 .step_deadline = options.step_deadline,
                 .version = ThisBuild().version,
                 .backend = std::string(impl->backends[0]->name()),
                 .backend_description = DescriptionOf(impl->backends),
                 .daemon_name = options.listen.empty() ? "in-process" : options.listen.front(),
                 .started = absl::Now()});
  impl->peer_service = std::make_unique<PeerService>(impl->runs.get());
  impl->admin_service = impl->MakeAdminService(options.settings);
  impl->WatchQueues();
  impl->checkpoint_service =
      std::make_unique<CheckpointService>(impl->runs.get(), impl->checkpointer.get());
  impl->checkpoint_peer_service =
      std::make_unique<CheckpointPeerService>(impl->runs.get(), impl->checkpointer.get());
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
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
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
  impl_->server->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  impl_->server->Wait();
  if (impl_->health_server != nullptr) impl_->health_server->Shutdown();
  impl_->arena_socket.reset();
  impl_->metrics_server.reset();
  if (impl_->checkpointer != nullptr) impl_->checkpointer->Stop();
  impl_->peer_executor.reset();
  StopAll(impl_->executors);
  impl_->runs.reset();
  for (const std::string& path : impl_->socket_paths) unlink(path.c_str());
}

}  // namespace muond
