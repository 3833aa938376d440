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
#include "server/daemon/backends.h"
#include "server/daemon/build_info.h"
#include "server/metrics/metrics_server.h"
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

}  // namespace

// In the order of construction; destroyed in reverse, the executors' threads before what they use.
struct Service::Impl {
  kernels::NewtonSchulzFault newton_schulz_fault;
  std::vector<std::unique_ptr<kernels::Backend>> backends;  // one per device
  FaultInjector faults;
  std::unique_ptr<DaemonMetrics> metrics;
  std::unique_ptr<ArenaTable> arenas;
  std::string arena_path, why_no_arenas;  // one of them is empty
  std::unique_ptr<RunTable> runs;
  std::vector<std::unique_ptr<Executor>> executors;  // one per device
  std::shared_ptr<Peers> peers;
  std::unique_ptr<Executor> peer_executor;
  std::unique_ptr<OptimizerService> service;
  std::unique_ptr<PeerService> peer_service;
  std::unique_ptr<ArenaSocket> arena_socket;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<MetricsServer> metrics_server;
  std::vector<std::string> addresses;
  std::vector<std::string> socket_paths;
  bool stopped = false;

  void PrepareArenas(const ServiceOptions& options);
  absl::Status Listen(const ServiceOptions& options);
  void SetServing(bool serving);
};

void Service::Impl::SetServing(bool serving) {
  metrics->SetReady(serving);
  auto* health = server->GetHealthCheckService();
  if (health == nullptr) return;
  for (const char* name : {"", "liveness", "readiness", "muond.v1.Optimizer"}) {
    health->SetServingStatus(name, serving || std::string(name) == "liveness");
  }
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
      builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &ports[i]);
    }
  }
  if (!arena_path.empty()) {
    MUOND_ASSIGN_OR_RETURN(arena_socket, ArenaSocket::Listen(arena_path, arenas.get()));
  }
  builder.RegisterService(service.get());
  if (peers->count() > 1) builder.RegisterService(peer_service.get());
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
    const bool any_port = absl::EndsWith(address, ":0");
    addresses.push_back(
        absl::StartsWith(address, kUnixPrefix) || !any_port
            ? address
            : absl::StrFormat("%s:%d", address.substr(0, address.rfind(':')), ports[i]));
  }
  if (server == nullptr) return absl::UnavailableError("start the gRPC server: it did not start");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Service>> Service::Start(const ServiceOptions& options) {
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
  impl->peers = std::make_shared<Peers>(peers, options.peer_patience);
  impl->peer_executor = std::make_unique<Executor>();
  impl->runs =
      std::make_unique<RunTable>(RunContext{.devices = std::move(devices),
                                            .faults = {&impl->faults, &impl->newton_schulz_fault},
                                            .metrics = impl->metrics.get(),
                                            .limits = LimitsOf(options),
                                            .peers = impl->peers,
                                            .peer_executor = impl->peer_executor.get()},
                                 options.max_runs);
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
  MUOND_RETURN_IF_ERROR(impl->Listen(options));
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

std::string Service::Metrics() { return impl_->metrics->Serialize(); }

void Service::Stop(absl::Duration grace) {
  if (impl_->stopped) return;
  impl_->stopped = true;
  impl_->SetServing(false);
  // Calls in flight end by themselves or are cancelled when the grace is over; only then may runs
  // and the executor go.
  impl_->runs->Drain(absl::UnavailableError("the daemon is shutting down: try again later"));
  impl_->server->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  impl_->server->Wait();
  impl_->arena_socket.reset();
  impl_->metrics_server.reset();
  impl_->peer_executor.reset();
  StopAll(impl_->executors);
  impl_->runs.reset();
  for (const std::string& path : impl_->socket_paths) unlink(path.c_str());
}

}  // namespace muond
