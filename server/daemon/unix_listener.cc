#include "server/daemon/unix_listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/security/server_credentials.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/steady_time.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

using ExternalType = grpc::ServerBuilder::experimental_type::ExternalConnectionType;

constexpr absl::Duration kLogInterval = absl::Seconds(1);
constexpr int kOutOfDescriptorsMs = 10;

// Answers every call alike.
class Refuse final : public grpc::ServerGenericBidiReactor {
 public:
  Refuse() {
    Finish({grpc::StatusCode::PERMISSION_DENIED,
            absl::StrFormat("unix socket: your user may not use the daemon of user %d: its "
                            "operator names others with --socket-users",
                            geteuid())});
  }
  void OnDone() override { delete this; }
};

}  // namespace

class UnixListener::Refusal final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Refuse;
  }
};

UnixListener::UnixListener(PeerGate gate, Descriptor stop)
    : gate_(std::move(gate)), stop_(std::move(stop)) {}

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Bind(
    const std::vector<std::string>& paths, PeerGate gate, grpc::ServerBuilder& builder) {
  Descriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return absl::UnavailableError("listen: no descriptor is left");
  std::unique_ptr<UnixListener> listener(new UnixListener(std::move(gate), std::move(stop)));
  for (const std::string& path : paths) MUOND_RETURN_IF_ERROR(listener->BindOne(path));
  listener->admitted_ = builder.experimental().AddExternalConnectionAcceptor(
      ExternalType::FROM_FD, grpc::InsecureServerCredentials());
  MUOND_RETURN_IF_ERROR(listener->StartRefusing());
  return listener;
}

absl::Status UnixListener::BindOne(const std::string& path) {
  const auto fail = [&path](const std::string& why) {
    return absl::UnavailableError(absl::StrFormat("listen on unix:%s: cannot bind: %s", path, why));
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return fail("the path has more than 107 bytes");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  unlink(path.c_str());
  if (!listener.valid() ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return fail(std::strerror(errno));
  }
  const int descriptor = listener.get();
  sockets_.push_back({path, std::move(listener), gate_.WithFolderOf(path)});
  return listen(descriptor, SOMAXCONN) == 0 ? absl::OkStatus() : fail(std::strerror(errno));
}

absl::Status UnixListener::StartRefusing() {
  refusal_ = std::make_unique<Refusal>();
  grpc::ServerBuilder builder;
  refused_ = builder.experimental().AddExternalConnectionAcceptor(
      ExternalType::FROM_FD, grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(refusal_.get());
  // Nobody who may not stays for long, or sends much.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, 1'000);
  builder.SetMaxReceiveMessageSize(4096);
  refusing_ = builder.BuildAndStart();
  if (refusing_ == nullptr) return absl::UnavailableError("listen: the server did not start");
  return absl::OkStatus();
}

void UnixListener::Start() {
  thread_ = std::thread([this] { Serve(); });
}

void UnixListener::Stop() {
  const std::uint64_t one = 1;
  if (thread_.joinable() && write(stop_.get(), &one, sizeof(one)) == sizeof(one)) thread_.join();
  for (Socket& socket : sockets_) socket.listener = Descriptor();
}

UnixListener::~UnixListener() {
  Stop();
  if (refusing_ != nullptr) {
    refusing_->Shutdown(GrpcDeadlineIn(absl::ZeroDuration()));
    refusing_->Wait();
  }
  for (const Socket& socket : sockets_) unlink(socket.path.c_str());
}

void UnixListener::Serve() {
  for (;;) {
    std::vector<pollfd> polled = {{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
    for (const Socket& socket : sockets_) {
      polled.push_back({.fd = socket.listener.get(), .events = POLLIN, .revents = 0});
    }
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
      spdlog::error("unix sockets: poll: {}: nobody can connect any more", std::strerror(errno));
      return;
    }
    if (polled[0].revents != 0) return;
    for (std::size_t i = 0; i < sockets_.size(); ++i) {
      if (polled[i + 1].revents != 0) Accept(sockets_[i]);
    }
  }
}

void UnixListener::Accept(const Socket& socket) {
  for (;;) {
    const int connection =
        accept4(socket.listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection < 0) {
      // The queue stays readable: a pause keeps this from spinning.
      if (errno == EMFILE || errno == ENFILE) poll(nullptr, 0, kOutOfDescriptorsMs);
      return;
    }
    const std::string refusal = socket.gate.WhyNot(connection);
    if (!refusal.empty()) {
      // At most one line a second: whoever is refused decides how often to try.
      ++unlogged_;
      if (const absl::Time now = SteadyNow(); now >= next_line_) {
        spdlog::warn("refused on a unix socket: {} ({} refusals since the last line)", refusal,
                     std::exchange(unlogged_, 0));
        next_line_ = now + kLogInterval;
      }
    }
    Acceptor::NewConnectionParameters parameters;
    parameters.listener_fd = socket.listener.get();
    parameters.fd = connection;
    (refusal.empty() ? admitted_ : refused_)->HandleNewConnection(&parameters);
  }
}

}  // namespace muond
