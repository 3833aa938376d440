// Who may use the daemon's unix sockets: told by the kernel (SO_PEERCRED), not by the caller, and
// whatever the mode of the folder that they are in.
#pragma once

#include <sys/types.h>

#include <set>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace muond {

// A value; thread-safe.
class PeerGate {
 public:
  // Lets in the daemon's own user and root.
  PeerGate() = default;
  // And those: a user by name or number, or all members of a group as "@name" or "@number".
  // INVALID_ARGUMENT naming the entry when there is no such user or group.
  static absl::StatusOr<PeerGate> Make(std::span<const std::string> others);

  // Also the members of the group of the folder that this socket is in, where the folder is open to
  // them and not to everybody: whoever made it so has said who the socket is for.
  PeerGate WithFolderOf(const std::string& socket) const;

  // Whether anybody but the daemon's own user and root gets in.
  bool shared() const { return !users_.empty() || !groups_.empty(); }
  // Of the process that has connected: empty when it may, else why not.
  std::string WhyNot(int connection) const;

 private:
  std::set<uid_t> users_;
  std::set<gid_t> groups_;
};

}  // namespace muond
