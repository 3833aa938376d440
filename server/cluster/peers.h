// The connections to the other daemons. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "muond/v1/buddy.grpc.pb.h"
#include "muond/v1/checkpoint.grpc.pb.h"
#include "muond/v1/peer.grpc.pb.h"
#include "proto/channel.h"
#include "server/cluster/peer_list.h"

namespace muond {

// Calls `ask` for each of `count` daemons, each on a thread of its own, and waits for all.
void AtOnce(int count, const std::function<void(int daemon)>& ask);

class Peers {
 public:
  // Connects at the first call. `patience`: how long a peer may be out of reach before those who
  // wait for it are told.
  Peers(PeerList list, absl::Duration patience, const ChannelSecurity& security = {});

  // "" alone when this daemon has no peers.
  const std::vector<std::string>& daemons() const { return list_.daemons; }
  int self() const { return list_.self; }
  int count() const { return static_cast<int>(list_.daemons.size()); }
  absl::Duration patience() const { return patience_; }
  // Of another daemon than this one.
  v1::Peer::Stub& stub(int daemon) { return *stubs_[daemon]; }
  // Likewise, for checkpoints.
  v1::Checkpoint::Stub& checkpoints(int daemon) { return *checkpoints_[daemon]; }
  v1::CheckpointPeer::Stub& checkpoint_parts(int daemon) { return *checkpoint_parts_[daemon]; }

  // Likewise, on a connection of its own: copies of state and gradients are large.
  v1::Buddy::Stub& buddy(int daemon) { return *buddies_[daemon]; }

  // What daemons must agree on before they speak of a run: its plan, and the list of daemons.
  std::string Agreement(const std::string& plan_hash) const;
  // What every message to a peer says first.
  v1::PeerRun Introduction(const std::string& run, const std::string& plan_hash) const;

 private:
  PeerList list_;
  const absl::Duration patience_;
  std::vector<std::unique_ptr<v1::Peer::Stub>> stubs_;
  std::vector<std::unique_ptr<v1::Checkpoint::Stub>> checkpoints_;
  std::vector<std::unique_ptr<v1::CheckpointPeer::Stub>> checkpoint_parts_;
  std::vector<std::unique_ptr<v1::Buddy::Stub>> buddies_;
};

}  // namespace muond
