// The unix sockets of gRPC's server, listened on by ourselves: each connection is held against the
// kernel's word for who made it before gRPC hears of it.
//
// Who may not gets an answer all the same: his connection goes to a second server, which knows no
// method and says why to every call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "proto/arena_memory.h"
#include "server/transport/peer_gate.h"

namespace muond {

class UnixListener {
 public:
  // Binds the sockets, each for those that `gate` and its folder let in; files there are replaced:
  // whoever calls has made sure that nobody listens.
  // `builder`: of the server that gets those who may. UNAVAILABLE when a path can't be bound.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Bind(const std::vector<std::string>& paths,
                                                            PeerGate gate,
                                                            grpc::ServerBuilder& builder);
  // Stop, and the files go.
  ~UnixListener();

  // The server stands: begins to accept. What has connected since Bind has waited.
  void Start();
  // Accepts nobody any more.
  void Stop();

 private:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;
  class Refusal;
  UnixListener(PeerGate gate, Descriptor stop);
  struct Socket {
    std::string path;
    Descriptor listener;
    PeerGate gate;
  };
  absl::Status BindOne(const std::string& path);
  absl::Status StartRefusing();
  void Serve();
  void Accept(const Socket& socket);

  const PeerGate gate_;
  const Descriptor stop_;  // an eventfd
  std::vector<Socket> sockets_;
  std::unique_ptr<Refusal> refusal_;
  std::unique_ptr<grpc::Server> refusing_;
  std::unique_ptr<Acceptor> admitted_, refused_;
  absl::Time next_line_ = absl::InfinitePast();  // of the log
  std::int64_t unlogged_ = 0;                    // refusals
  std::thread thread_;
};

}  // namespace muond
