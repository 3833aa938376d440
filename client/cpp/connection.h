// How a client reaches a daemon: what an endpoint may look like, and which channel carries what.
//
// Control and bulk travel on connections of their own: a small call that shares one with messages
// of a megabyte waits behind them. Every channel pings its peer, so that a daemon that vanished
// without a word is noticed within seconds; gRPC's own retries are off, retry.h decides alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/channel.h"
#include "proto/tls.h"

namespace muond::client {

class ArenaLink;
class Bounce;
class GpuLink;
class PairLink;

// What a message holds beside the payload of its chunk: names, ids, and room to grow.
inline constexpr std::int64_t kMessageHeaderBytes = 64 * 1024;
// Limit of a control message: a routing report of some hundred thousand parameters.
inline constexpr std::int64_t kControlMessageBytes = std::int64_t{64} << 20;

// The gRPC target of an endpoint: "unix:///p", "unix:/p" or "host:port"; empty means
// $MUOND_ENDPOINT. INVALID_ARGUMENT that quotes the endpoint and shows what is meant.
absl::StatusOr<std::string> ResolveTarget(const std::string& endpoint);

// What channels are made with: by `tls`, or where that is empty by $MUOND_TLS_*, or plain. Errors
// as CheckTlsFiles.
absl::StatusOr<ChannelSecurity> ResolveSecurity(const TlsFiles& tls);

// The channels of one session. Thread-safe.
class Connection {
 public:
  // `channel`, when given, carries everything (an in-process server's has no connection to share).
  static absl::StatusOr<std::unique_ptr<Connection>> Open(const std::string& endpoint,
                                                          std::shared_ptr<grpc::Channel> channel,
                                                          std::int64_t chunk_bytes,
                                                          const ChannelSecurity& security = {});

  v1::Optimizer::Stub& control() { return *control_; }
  // For the streams of chunks, which are written and read as raw buffers
  // (proto/chunk_message.h).
  const std::shared_ptr<grpc::Channel>& bulk() const { return bulk_; }
  // Sleeps, at most until the CallScope is over, and lets a connection that broke come back
  // meanwhile: between calls nobody else in this process looks after its sockets, and gRPC itself
  // does so every five seconds only.
  void Pause(absl::Duration duration);
  // The data path to this daemon, as Register chose it.
  struct Path {
    std::string name = "grpc";  // RegisterReply.transport
    std::string reason;
    std::shared_ptr<ArenaLink> arena;  // of path "arena"
    std::shared_ptr<GpuLink> gpu;      // of path "cuda-ipc"
    std::shared_ptr<PairLink> pair;    // of path "nccl"
    // Lost ones: views of them may still be read.
    std::vector<std::shared_ptr<GpuLink>> retired;
    std::shared_ptr<Bounce> bounce;  // of a GPU's slices on other paths, once there are any
  };
  // Belongs to whoever calls this daemon.
  Path& path() { return path_; }
  // Beside the endpoint's own unix socket; empty for TCP.
  std::string arena_socket() const;

  // For messages: the endpoint, or "in-process".
  const std::string& peer() const { return peer_; }

 private:
  Connection() = default;
  std::string peer_;
  std::shared_ptr<grpc::Channel> control_channel_;  // null inside the process
  Path path_;
  std::unique_ptr<v1::Optimizer::Stub> control_;
  std::shared_ptr<grpc::Channel> bulk_;
};

}  // namespace muond::client
