#include "server/transport/peer_gate.h"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

constexpr std::size_t kNameBufferBytes = 64 << 10;

absl::StatusOr<uid_t> UserOf(const std::string& name) {
  uid_t number = 0;
  if (absl::SimpleAtoi(name, &number)) return number;
  std::vector<char> buffer(kNameBufferBytes);
  passwd entry{}, *found = nullptr;
  getpwnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found != nullptr) return found->pw_uid;
  return absl::InvalidArgumentError(
      absl::StrFormat("socket users: \"%s\": there is no such user", name));
}

absl::StatusOr<gid_t> GroupOf(const std::string& name) {
  gid_t number = 0;
  if (absl::SimpleAtoi(name, &number)) return number;
  std::vector<char> buffer(kNameBufferBytes);
  group entry{}, *found = nullptr;
  getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found != nullptr) return found->gr_gid;
  return absl::InvalidArgumentError(
      absl::StrFormat("socket users: \"@%s\": there is no such group", name));
}

// The groups beside its own that the process had when it connected; none where the kernel does not
// tell.
std::vector<gid_t> GroupsOf(int connection) {
  std::vector<gid_t> groups(64);
  for (;;) {
    auto bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (getsockopt(connection, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
      groups.resize(bytes / sizeof(gid_t));
      return groups;
    }
    if (errno != ERANGE || bytes / sizeof(gid_t) <= groups.size()) return {};
    groups.resize(bytes / sizeof(gid_t));
  }
}

}  // namespace

absl::StatusOr<PeerGate> PeerGate::Make(std::span<const std::string> others) {
  PeerGate gate;
  for (const std::string& name : others) {
    if (name.starts_with('@')) {
      MUOND_ASSIGN_OR_RETURN(const gid_t number, GroupOf(name.substr(1)));
      gate.groups_.insert(number);
    } else {
      MUOND_ASSIGN_OR_RETURN(const uid_t number, UserOf(name));
      gate.users_.insert(number);
    }
  }
  return gate;
}

PeerGate PeerGate::WithFolderOf(const std::string& socket) const {
  PeerGate gate = *this;
  const std::size_t slash = socket.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : socket.substr(0, slash + 1);
  struct stat info;
  if (stat(folder.c_str(), &info) == 0 && (info.st_mode & (S_IXGRP | S_IXOTH)) == S_IXGRP) {
    gate.groups_.insert(info.st_gid);
  }
  return gate;
}

std::string PeerGate::WhyNot(int connection) const {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return "its user can't be told";
  }
  if (peer.uid == geteuid() || peer.uid == 0 || users_.contains(peer.uid)) return "";
  if (groups_.contains(peer.gid)) return "";
  const std::vector<gid_t> more = groups_.empty() ? std::vector<gid_t>() : GroupsOf(connection);
  if (std::any_of(more.begin(), more.end(), [&](gid_t g) { return groups_.contains(g); })) {
    return "";
  }
  return absl::StrFormat("user %d may not use the daemon of user %d (--socket-users)", peer.uid,
                         geteuid());
}

}  // namespace muond
