#include "server/transport/peer_gate.h"

#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/arena_memory.h"

namespace muond {
namespace {

PeerGate GateFor(const std::vector<std::string>& others) {
  auto gate = PeerGate::Make(others);
  EXPECT_TRUE(gate.ok()) << gate.status();
  return *std::move(gate);
}

// A pair of sockets that a process of that user, with these groups, has made.
int PairOf(uid_t user, gid_t group, const std::vector<gid_t>& more) {
  int ends[2], carrier[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, carrier), 0);
  const pid_t child = fork();
  if (child == 0) {
    const bool other = setgroups(more.size(), more.data()) == 0 && setgid(group) == 0 &&
                       setuid(user) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0;
    _exit(other && SendArena(carrier[1], ends[0], "").ok() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  char data[256];
  iovec piece{data, sizeof(data)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  EXPECT_GE(recvmsg(carrier[0], &message, 0), 0);
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  int received = -1;
  if (header != nullptr) std::memcpy(&received, CMSG_DATA(header), sizeof(received));
  close(carrier[0]);
  close(carrier[1]);
  return received;
}

TEST(PeerGate, TakesNamesAndNumbersOfUsersAndGroups) {
  EXPECT_FALSE(GateFor({}).shared());
  EXPECT_TRUE(GateFor({"root", "12345", "@root", "@54321"}).shared());
  EXPECT_EQ(PeerGate::Make(std::vector<std::string>{"nobody-of-that-name"}).status().message(),
            "socket users: \"nobody-of-that-name\": there is no such user");
  EXPECT_EQ(PeerGate::Make(std::vector<std::string>{"@none-of-that-name"}).status().message(),
            "socket users: \"@none-of-that-name\": there is no such group");
}

TEST(PeerGate, LetsItsOwnUserIn) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const Descriptor one(ends[0]), other(ends[1]);
  EXPECT_EQ(PeerGate().WhyNot(one.get()), "");
  EXPECT_EQ(PeerGate().WhyNot(-1), "its user can't be told");
}

TEST(PeerGate, AnotherUserNeedsHisNameOrAGroupOnTheList) {
  if (geteuid() != 0) GTEST_SKIP() << "*** NEEDS ROOT TO BE ANOTHER USER: not tested ***";
  const Descriptor peer(PairOf(4001, 5001, {5002, 5003}));
  ASSERT_TRUE(peer.valid());
  EXPECT_EQ(PeerGate().WhyNot(peer.get()),
            "user 4001 may not use the daemon of user 0 (--socket-users)");
  EXPECT_NE(GateFor({"4002", "@5004", "@4001"}).WhyNot(peer.get()), "");
  EXPECT_NE(GateFor({"5001"}).WhyNot(peer.get()), "");
  EXPECT_EQ(GateFor({"4001"}).WhyNot(peer.get()), "");
  EXPECT_EQ(GateFor({"@5001"}).WhyNot(peer.get()), "");
  EXPECT_EQ(GateFor({"@5003"}).WhyNot(peer.get()), "");
}

TEST(PeerGate, AFolderThatIsOpenToItsGroupAloneSaysWhoTheSocketIsFor) {
  char folder[] = "/tmp/muond-gate-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string socket = std::string(folder) + "/muond.sock";
  for (const auto& [mode, shared] : {std::pair{0700, false}, {0750, true}, {0755, false},
                                     {01777, false}, {0710, true}, {0740, false}}) {
    ASSERT_EQ(chmod(folder, mode), 0);
    EXPECT_EQ(PeerGate().WithFolderOf(socket).shared(), shared) << std::oct << mode;
  }
  rmdir(folder);
}

}  // namespace
}  // namespace muond
