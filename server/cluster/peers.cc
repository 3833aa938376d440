#include "server/cluster/peers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "grpcpp/grpcpp.h"

namespace muond {
namespace {

constexpr int kKeepaliveMs = 10'000;
constexpr int kReconnectInitialMs = 100;
constexpr int kReconnectMaxMs = 1'000;
constexpr int kMessageBytesMax = 64 << 20;

// Daemons talk in small messages that others wait for: on connections of their own, never behind
// the trainers' gradients.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectInitialMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kReconnectInitialMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

Peers::Peers(PeerList list, absl::Duration patience)
    : list_(std::move(list)), patience_(patience) {
  if (list_.daemons.empty()) list_.daemons = {""};
  for (int daemon = 0; daemon < count(); ++daemon) {
    stubs_.push_back(daemon == self() ? nullptr
                                      : v1::Peer::NewStub(MakeChannel(list_.daemons[daemon])));
  }
}

std::string Peers::Agreement(const std::string& plan_hash) const {
  return absl::StrCat(plan_hash, " over ", absl::StrJoin(list_.daemons, ","));
}

v1::PeerRun Peers::Introduction(const std::string& run, const std::string& plan_hash) const {
  v1::PeerRun peer;
  peer.set_run(run);
  peer.set_daemon(self());
  peer.set_agreement(Agreement(plan_hash));
  return peer;
}

}  // namespace muond
