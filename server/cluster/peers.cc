#include "server/cluster/peers.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/version.h"

namespace muond {
namespace {

constexpr std::int64_t kMessageBytesMax = std::int64_t{64} << 20;

}  // namespace

void AtOnce(int count, const std::function<void(int daemon)>& ask) {
  std::vector<std::thread> threads;
  for (int daemon = 0; daemon < count; ++daemon) threads.emplace_back([&, daemon] { ask(daemon); });
  for (std::thread& thread : threads) thread.join();
}

// Daemons talk in small messages that others wait for: never behind the trainers' gradients.
Peers::Peers(PeerList list, absl::Duration patience, const ChannelSecurity& security)
    : list_(std::move(list)), patience_(patience) {
  if (list_.daemons.empty()) list_.daemons = {""};
  for (int daemon = 0; daemon < count(); ++daemon) {
    const auto channel = daemon == self()
                             ? nullptr
                             : MakeChannel(list_.daemons[daemon], kMessageBytesMax, security);
    stubs_.push_back(channel == nullptr ? nullptr : v1::Peer::NewStub(channel));
    checkpoints_.push_back(channel == nullptr ? nullptr : v1::Checkpoint::NewStub(channel));
    checkpoint_parts_.push_back(channel == nullptr ? nullptr
                                                   : v1::CheckpointPeer::NewStub(channel));
    buddies_.push_back(daemon == self()
                           ? nullptr
                           : v1::Buddy::NewStub(MakeChannel(list_.daemons[daemon],
                                                            kMessageBytesMax, security)));
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
  peer.set_version(std::string(OwnVersion()));
  return peer;
}

}  // namespace muond
