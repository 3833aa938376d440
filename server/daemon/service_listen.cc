// Where a service listens: sockets that are free, gRPC's server, health.
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
#include "grpcpp/health_check_service_interface.h"
#include "proto/check.h"
#include "server/daemon/reflection.h"
#include "server/daemon/secure_listen.h"
#include "server/daemon/service_impl.h"
#include "server/rpc/metrics_interceptor.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// A registration of a hundred thousand parameters takes some tens of megabytes; a chunk's own limit
// is checked where its parameter can be named.
constexpr std::int64_t kMessageBytesMax = 64 << 20;
constexpr std::int64_t kHeaderBytes = 64 << 10;  // the fields of a chunk beside its payload
constexpr char kUnixPrefix[] = "unix:";
constexpr std::size_t kUnixPathBytesMax = 107;

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

}  // namespace

TlsFiles TlsOf(const ServiceOptions& options) {
  return {.certificate = options.tls_cert,
          .key = options.tls_key,
          .authority = options.tls_ca,
          .server_name = options.tls_server_name,
          .refresh = options.tls_refresh};
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
  SetReflection(builder, false);
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // gRPC starts no server without a service of ours.
  builder.RegisterCallbackGenericService(&no_service);
  health_server = builder.BuildAndStart();
  if (health_server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrFormat(
        "listen for health probes on %s: cannot bind: is another daemon there?", address));
  }
  health_address = BoundAddress(address, port);
  return absl::OkStatus();
}

std::vector<kernels::DeviceMemory*> Service::Impl::Gpus() const {
  std::vector<kernels::DeviceMemory*> gpus;
  for (const auto& memory : memories) {
    if (memory != nullptr && !memory->uuid().empty()) gpus.push_back(memory.get());
  }
  return gpus;
}

// Arenas are handed over beside the first unix socket.
void Service::Impl::PrepareArenas(const ServiceOptions& options) {
  const ArenaLimits limits{.bytes_max = options.max_arena_bytes, .count_max = options.max_arenas};
  arenas = std::make_unique<ArenaTable>(
      limits,
      [metrics = metrics.get()](std::int64_t attached, std::int64_t bytes) {
        metrics->SetArenas(attached, bytes);
      },
      [metrics = metrics.get()](std::int64_t attached, std::int64_t bytes) {
        metrics->SetGpuArenas(attached, bytes);
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
  MUOND_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ServerCredentials> tcp_credentials,
                         MakeServerCredentials(TlsOf(options)));
  grpc::ServerBuilder builder;
  SetReflection(builder, options.reflection);
  // One port variable per address: a unix address sets its port to 1.
  std::vector<int> ports(options.listen.size(), 0);
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < options.listen.size(); ++i) {
    const std::string& address = options.listen[i];
    if (absl::StartsWith(address, kUnixPrefix)) {
      const std::string path = UnixPath(address);
      MUOND_RETURN_IF_ERROR(PrepareSocket(path));
      paths.push_back(path);
      ports[i] = 1;  // what gRPC says of a unix socket
    } else {
      builder.AddListeningPort(address, tcp_credentials, &ports[i]);
    }
  }
  MUOND_ASSIGN_OR_RETURN(const PeerGate gate, PeerGate::Make(options.socket_users));
  if (!paths.empty()) {
    MUOND_ASSIGN_OR_RETURN(unix_listener, UnixListener::Bind(paths, gate, builder));
  }
  if (!arena_path.empty()) {
    MUOND_ASSIGN_OR_RETURN(arena_socket, ArenaSocket::Listen(arena_path, arenas.get(), gate));
  }
  builder.RegisterService(service.get());
  builder.RegisterService(admin_service.get());
  builder.RegisterService(checkpoint_service.get());
  if (peers->count() > 1) {
    builder.RegisterService(peer_service.get());
    builder.RegisterService(checkpoint_peer_service.get());
    builder.RegisterService(buddy_service.get());
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
  if (unix_listener != nullptr) unix_listener->Start();
  return absl::OkStatus();
}

}  // namespace muond
