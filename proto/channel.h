// How a connection to a daemon is made, by trainers and by other daemons alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "grpcpp/channel.h"
#include "grpcpp/security/credentials.h"

namespace muond {

// How a channel to another machine is kept from others (proto/tls.h); without credentials: not.
struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr;
  std::string server_name = {};  // that the peer's certificate must carry; empty: the target's host
};

// A channel that shares its connection with no other; connects at the first call. It pings its
// peer, so that a daemon that vanished without a word is noticed within seconds; gRPC's own retries
// are off, since callers decide about those. `target` as gRPC names it: "unix:/path", "host:port".
// A unix socket is guarded by its directory's mode and always plain.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target,
                                           std::int64_t message_bytes_max,
                                           const ChannelSecurity& security = {});

}  // namespace muond
