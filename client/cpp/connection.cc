#include "client/cpp/connection.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "proto/check.h"

namespace muond::client {
namespace {

constexpr int kKeepaliveMs = 10'000;
constexpr int kReconnectInitialMs = 50;
constexpr int kReconnectMaxMs = 1'000;
// sockaddr_un holds 108 bytes, one of them the terminator.
constexpr std::size_t kUnixPathMax = 107;

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

int Clamp(std::int64_t bytes) {
  return static_cast<int>(std::min<std::int64_t>(bytes, std::numeric_limits<int>::max()));
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

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target,
                                           std::int64_t message_bytes_max) {
  grpc::ChannelArguments arguments;
  // Without a pool of its own a second channel to the same target shares the first one's socket.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A daemon that restarts is back within a second or two: look for it that often.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectInitialMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  // A daemon is named by an address of its own; a proxy for web pages has no part in it.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(Clamp(message_bytes_max));
  arguments.SetMaxSendMessageSize(Clamp(message_bytes_max));
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

absl::StatusOr<std::unique_ptr<Connection>> Connection::Open(
    const std::string& endpoint, std::shared_ptr<grpc::Channel> channel,
    std::int64_t chunk_bytes) {
  std::unique_ptr<Connection> connection(new Connection());
  if (channel != nullptr) {
    connection->peer_ = "in-process";
    connection->control_ = v1::Optimizer::NewStub(channel);
    connection->bulk_ = std::move(channel);
    return connection;
  }
  MUOND_ASSIGN_OR_RETURN(connection->peer_, ResolveTarget(endpoint));
  connection->control_ =
      v1::Optimizer::NewStub(MakeChannel(connection->peer_, kControlMessageBytes));
  // A chunk with its header; and a Pull that names some hundred thousand slices.
  connection->bulk_ = MakeChannel(
      connection->peer_, std::max(chunk_bytes + kMessageHeaderBytes, kControlMessageBytes));
  return connection;
}

}  // namespace muond::client
