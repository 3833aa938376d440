// The ceiling of a transport over gRPC: a stream of byte buffers that nobody reads, copies or
// checks. A push or a pull of the same chunks cannot be faster.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class Channel;
class Server;
}  // namespace grpc

namespace muond::bench {

// Takes streams and throws them away, gives streams of one buffer again and again.
class BareStreamServer {
 public:
  // Listens on "unix:/path" or "127.0.0.1:0". UNAVAILABLE when it can't.
  static absl::StatusOr<std::unique_ptr<BareStreamServer>> Start(const std::string& address);
  ~BareStreamServer();

  int port() const { return port_; }  // of a TCP address

 private:
  class Service;
  BareStreamServer();
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

struct BareStreamRates {
  double push = 0;  // bytes per second from client to server
  double pull = 0;  // and back
};

// Streams `total_bytes` each way in messages of `chunk_bytes`, several times; medians. Errors are
// the channel's.
absl::StatusOr<BareStreamRates> MeasureBareStream(const std::shared_ptr<grpc::Channel>& channel,
                                                  std::int64_t chunk_bytes,
                                                  std::int64_t total_bytes);

// The same against a server in a process of its own, as a daemon is: `program` is run as
// `program --serve-bare-stream SOCKET` and ends when its standard input does.
absl::StatusOr<BareStreamRates> MeasureBareStreamOfProcess(const std::string& program,
                                                           std::int64_t chunk_bytes,
                                                           std::int64_t total_bytes);

// What that process does: serves on `socket` until standard input ends; the exit code.
int ServeBareStream(const std::string& socket);

}  // namespace muond::bench
