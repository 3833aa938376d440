#include "client/cpp/connection.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cpp/call_scope.h"
#include "proto/check.h"
#include "proto/grpc_deadline.h"
#include "proto/steady_time.h"

namespace muond::client {
namespace {

// sockaddr_un holds 108 bytes, one of them the terminator.
constexpr std::size_t kUnixPathMax = 107;
// Between looks at whether the calls of this thread are over, while a channel connects.
constexpr absl::Duration kLook = absl::Milliseconds(20);

absl::Status BadEndpoint(const std::string& endpoint, const char* cause) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "endpoint \"%s\": %s; expected \"unix:///path\" or \"host:port\"", endpoint, cause));
}

absl::StatusOr<std::string> ResolveUnix(const std::string& endpoint) {
  std::string path = endpoint.substr(5);
  if (absl::StartsWith(path, "//")) {
    path = path.substr(2);
    if (!absl::StartsWith(path, "/")) {
      return BadEndpoint(endpoint, "a unix socket has no host, its path needs three slashes");
    }
  }
  if (path.empty()) return BadEndpoint(endpoint, "the path of the unix socket is missing");
  if (path.size() > kUnixPathMax) {
    return BadEndpoint(endpoint, "the path of a unix socket has at most 107 bytes");
  }
  return "unix:" + path;
}

}  // namespace

absl::StatusOr<std::string> ResolveTarget(const std::string& endpoint) {
  if (endpoint.empty()) {
    const char* variable = std::getenv("MUOND_ENDPOINT");
    if (variable == nullptr || *variable == '\0') {
      return absl::InvalidArgumentError(
          "endpoint: none given and MUOND_ENDPOINT is not set; expected \"unix:///path\" or "
          "\"host:port\"");
    }
    return ResolveTarget(variable);
  }
  if (absl::StartsWith(endpoint, "unix:")) return ResolveUnix(endpoint);
  if (absl::StrContains(endpoint, "/")) {
    return BadEndpoint(endpoint, endpoint[0] == '/' ? "a path needs \"unix://\" before it"
                                                    : "unknown scheme");
  }
  const std::size_t colon = endpoint.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 || colon + 1 == endpoint.size()) {
    return BadEndpoint(endpoint, "host or port is missing");
  }
  for (const char c : endpoint.substr(colon + 1)) {
    port = c >= '0' && c <= '9' && port <= 65'535 ? port * 10 + (c - '0') : 65'536;
  }
  if (port < 1 || port > 65'535) return BadEndpoint(endpoint, "the port is not within 1..65535");
  return endpoint;
}

absl::StatusOr<ChannelSecurity> ResolveSecurity(const TlsFiles& tls) {
  return MakeChannelSecurity(tls.empty() ? TlsFromEnvironment() : tls);
}

absl::StatusOr<std::unique_ptr<Connection>> Connection::Open(
    const std::string& endpoint, std::shared_ptr<grpc::Channel> channel, std::int64_t chunk_bytes,
    const ChannelSecurity& security) {
  std::unique_ptr<Connection> connection(new Connection());
  if (channel != nullptr) {
    connection->peer_ = "in-process";
    connection->control_ = v1::Optimizer::NewStub(channel);
    connection->bulk_ = std::move(channel);
    return connection;
  }
  MUOND_ASSIGN_OR_RETURN(connection->peer_, ResolveTarget(endpoint));
  connection->control_channel_ = MakeChannel(connection->peer_, kControlMessageBytes, security);
  connection->control_ = v1::Optimizer::NewStub(connection->control_channel_);
  // A chunk with its header; and a Pull that names some hundred thousand slices.
  connection->bulk_ =
      MakeChannel(connection->peer_,
                  std::max(chunk_bytes + kMessageHeaderBytes, kControlMessageBytes), security);
  return connection;
}

void Connection::Pause(absl::Duration duration) {
  const absl::Time end = SteadyNow() + duration;
  for (grpc::Channel* channel : {control_channel_.get(), bulk_.get()}) {
    if (control_channel_ == nullptr) break;  // inside the process: nothing to connect
    // Waiting is what makes gRPC work on it; nothing ends it early.
    while (channel->GetState(/*try_to_connect=*/true) != GRPC_CHANNEL_READY &&
           SteadyNow() < end && !CallScope::CurrentIsOver()) {
      channel->WaitForConnected(GrpcDeadline(std::min(end, SteadyNow() + kLook)));
    }
  }
  CallScope::Sleep(end - SteadyNow());
}

std::string Connection::arena_socket() const {
  return absl::StartsWith(peer_, "unix:") ? peer_.substr(5) + ".arena" : "";
}

}  // namespace muond::client
