// The socket that hands arenas over: beside gRPC's unix socket, in the same directory.
//
// One thread; a peer is a process that the daemon's unix sockets are for (peer_gate.h) and that
// shows a handle at once. Everybody else is refused with the reason. A peer that neither speaks nor
// goes away holds one of few places for a few seconds.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/arena_memory.h"
#include "server/transport/arena_table.h"
#include "server/transport/peer_gate.h"

namespace muond {

class ArenaSocket {
 public:
  // Whoever calls has made sure that no other daemon listens there; a socket file that one has left
  // is replaced. UNAVAILABLE with the cause when it can't listen. `table` outlives the socket.
  static absl::StatusOr<std::unique_ptr<ArenaSocket>> Listen(const std::string& path,
                                                             ArenaTable* table,
                                                             PeerGate gate = {});
  // Closes all connections; the arenas go with them.
  ~ArenaSocket();

  const std::string& path() const { return path_; }

 private:
  struct Peer {
    Descriptor connection;
    absl::Time greet_until;
    std::shared_ptr<Arena> arena;  // null until it has shown a handle
  };
  ArenaSocket(std::string path, ArenaTable* table, PeerGate gate, Descriptor listener,
              Descriptor stop)
      : path_(std::move(path)),
        table_(table),
        gate_(std::move(gate)),
        listener_(std::move(listener)),
        stop_(std::move(stop)) {}
  void Serve();
  void Accept();
  // False: the peer goes.
  bool Hear(Peer& peer);
  // Peers that say nothing, and those whose arena was closed.
  void DropStale(absl::Time now);

  const std::string path_;
  ArenaTable* const table_;
  const PeerGate gate_;
  const Descriptor listener_;
  const Descriptor stop_;  // an eventfd
  std::vector<Peer> peers_;
  std::thread thread_;
};

}  // namespace muond
