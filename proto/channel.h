// How a connection to a daemon is made, by trainers and by other daemons alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "grpcpp/channel.h"

namespace muond {

// A channel that shares its connection with no other; connects at the first call. It pings its
// peer, so that a daemon that vanished without a word is noticed within seconds; gRPC's own retries
// are off, since callers decide about those. `target` as gRPC names it: "unix:/path", "host:port".
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target,
                                           std::int64_t message_bytes_max);

}  // namespace muond
