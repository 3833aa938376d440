#include "server/transport/arena_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/steady_time.h"

namespace muond {
namespace {

constexpr int kPollMs = 1'000;  // between looks for arenas that nobody came for
constexpr absl::Duration kGreetWithin = absl::Seconds(5);
// Peers that have not shown a handle yet. Others wait in the kernel's queue or are turned away.
constexpr std::ptrdiff_t kSilentMax = 32;
constexpr int kBacklog = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<ArenaSocket>> ArenaSocket::Listen(const std::string& path,
                                                                 ArenaTable* table,
                                                                 PeerGate gate) {
  const auto fail = [&path](const std::string& why) {
    return absl::UnavailableError(absl::StrFormat("arena socket \"%s\": %s", path, why));
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return fail("the path has more than 107 bytes");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  struct stat info;
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) return fail("a file that is no socket is in the way");
    unlink(path.c_str());
  }
  gate = gate.WithFolderOf(path);
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  Descriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener.valid() || !stop.valid() ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), gate.shared() ? 0660 : 0600) != 0 ||
      listen(listener.get(), kBacklog) != 0) {
    return fail(std::strerror(errno));
  }
  std::unique_ptr<ArenaSocket> result(
      new ArenaSocket(path, table, std::move(gate), std::move(listener), std::move(stop)));
  result->thread_ = std::thread([self = result.get()] { self->Serve(); });
  return result;
}

ArenaSocket::~ArenaSocket() {
  const std::uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof(one)) == sizeof(one) && thread_.joinable()) thread_.join();
  for (const Peer& peer : peers_) {
    if (peer.arena != nullptr) table_->Detach(peer.arena);
  }
  unlink(path_.c_str());
}

void ArenaSocket::Serve() {
  for (;;) {
    std::vector<pollfd> polled = {{.fd = stop_.get(), .events = POLLIN, .revents = 0},
                                  {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Peer& peer : peers_) {
      polled.push_back({.fd = peer.connection.get(), .events = POLLIN, .revents = 0});
    }
    if (poll(polled.data(), polled.size(), kPollMs) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    // From the back: a peer that goes leaves the others' places as they are.
    for (std::size_t i = peers_.size(); i-- > 0;) {
      if (polled[i + 2].revents == 0 || Hear(peers_[i])) continue;
      if (peers_[i].arena != nullptr) table_->Detach(peers_[i].arena);
      peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (polled[1].revents != 0) Accept();
    const absl::Time now = SteadyNow();
    DropStale(now);
    table_->Sweep(now);
  }
}

void ArenaSocket::Accept() {
  for (;;) {
    Descriptor connection(
        accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!connection.valid()) {
      // Out of descriptors: the queue stays readable, so that a pause keeps this from spinning.
      if (errno == EMFILE || errno == ENFILE) poll(nullptr, 0, 10);
      return;
    }
    std::string refusal = gate_.WhyNot(connection.get());
    const auto silent = std::count_if(peers_.begin(), peers_.end(),
                                      [](const Peer& peer) { return peer.arena == nullptr; });
    if (refusal.empty() && silent >= kSilentMax) refusal = "too many at once";
    if (!refusal.empty()) {
      SendArena(connection.get(), -1, refusal).IgnoreError();
      continue;
    }
    peers_.push_back({.connection = std::move(connection),
                      .greet_until = SteadyNow() + kGreetWithin,
                      .arena = nullptr});
  }
}

bool ArenaSocket::Hear(Peer& peer) {
  char packet[kArenaGreetingBytes + 1];
  const ssize_t got = recv(peer.connection.get(), packet, sizeof(packet), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (peer.arena != nullptr) return false;  // it hung up, or speaks where there is nothing to say
  if (got != static_cast<ssize_t>(kArenaGreetingBytes) ||
      std::memcmp(packet, kArenaGreeting, 8) != 0) {
    if (got > 0) SendArena(peer.connection.get(), -1, "not a greeting").IgnoreError();
    return false;
  }
  auto arena = table_->Attach(std::string(packet + 8, kArenaHandleBytes));
  if (!arena.ok()) {
    SendArena(peer.connection.get(), -1, std::string(arena.status().message())).IgnoreError();
    return false;
  }
  peer.arena = *std::move(arena);
  if (!SendArena(peer.connection.get(), peer.arena->descriptor(), "").ok()) return false;
  peer.arena->DropDescriptor();
  return true;
}

void ArenaSocket::DropStale(absl::Time now) {
  std::erase_if(peers_, [now](const Peer& peer) {
    return peer.arena == nullptr ? peer.greet_until <= now : peer.arena->revoked();
  });
}

}  // namespace muond
