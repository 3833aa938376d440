#include "proto/channel.h"

#include <algorithm>
#include <limits>

#include "absl/strings/match.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace muond {
namespace {

constexpr int kKeepaliveMs = 10'000;
constexpr int kReconnectInitialMs = 50;
constexpr int kReconnectMaxMs = 1'000;
// A busy machine takes its time to accept; giving up earlier only makes it busier.
constexpr int kConnectTimeoutMs = 5'000;

int Clamp(std::int64_t bytes) {
  return static_cast<int>(std::min<std::int64_t>(bytes, std::numeric_limits<int>::max()));
}

}  // namespace

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target,
                                           std::int64_t message_bytes_max,
                                           const ChannelSecurity& security) {
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
  // What gRPC calls the minimum is the time that an attempt to connect gets.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  // A daemon is named by an address of its own; a proxy for web pages has no part in it.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(Clamp(message_bytes_max));
  arguments.SetMaxSendMessageSize(Clamp(message_bytes_max));
  if (security.credentials == nullptr || absl::StartsWith(target, "unix:")) {
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  }
  if (!security.server_name.empty()) arguments.SetSslTargetNameOverride(security.server_name);
  return grpc::CreateCustomChannel(target, security.credentials, arguments);
}

}  // namespace muond
