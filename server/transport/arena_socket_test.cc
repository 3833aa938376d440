#include "proto/steady_time.h"
#include "server/transport/arena_socket.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

constexpr ArenaSize kSize{64 * 1024, 1};

class ArenaSocketTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/muond-arena-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
    auto socket = ArenaSocket::Listen(path(), &table_);
    ASSERT_TRUE(socket.ok()) << socket.status();
    socket_ = *std::move(socket);
  }
  void TearDown() override {
    socket_.reset();
    std::filesystem::remove_all(directory_);
  }
  std::string path() const { return directory_ + "/s.arena"; }

  std::shared_ptr<Arena> Open(std::int64_t rank = 0) {
    return *table_.Open({"r", rank}, kSize, SteadyNow());
  }
  absl::StatusOr<ReceivedArena> Fetch(const std::string& handle) {
    return ReceiveArena(path(), handle, absl::Seconds(20));
  }
  static bool Eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000 && !condition(); ++i) absl::SleepFor(absl::Milliseconds(5));
    return condition();
  }
  // Sends bytes on a connection of its own; what came back.
  std::string Say(const std::string& bytes) {
    Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path().c_str());
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return "?";
    if (!bytes.empty()) send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    char answer[256];
    const ssize_t got = recv(fd.get(), answer, sizeof(answer), 0);
    return std::string(answer, got > 0 ? static_cast<std::size_t>(got) : 0);
  }

  std::string directory_;
  ArenaTable table_{{}};
  std::unique_ptr<ArenaSocket> socket_;
};

TEST_F(ArenaSocketTest, WhoShowsTheHandleGetsTheMemoryAndKeepsItWhileConnected) {
  auto arena = Open();
  auto received = Fetch(arena->handle());
  ASSERT_TRUE(received.ok()) << received.status();
  auto memory = ArenaMemory::Map(std::move(received->memory), arena->layout().bytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const ArenaWindow window = arena->layout().windows[0];
  std::memcpy(memory->data() + window.offset, "hello", 5);
  const auto region = arena->Region(0, window.offset, 5);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(*region, "hello");
  EXPECT_EQ(table_.attached(), 1);
  EXPECT_FALSE(ArenaHungUp(received->connection.get()));
  received->connection = Descriptor();  // the trainer is gone
  EXPECT_TRUE(Eventually([&] { return table_.attached() == 0; }));
  EXPECT_TRUE(arena->revoked());
}

TEST_F(ArenaSocketTest, AClosedArenaHangsUpOnItsTrainer) {
  auto arena = Open();
  const auto received = Fetch(arena->handle());
  ASSERT_TRUE(received.ok());
  table_.Close(arena->owner());
  EXPECT_TRUE(Eventually([&] { return ArenaHungUp(received->connection.get()); }));
}

TEST_F(ArenaSocketTest, StaleHandlesAndNoiseAreRefused) {
  auto arena = Open();
  ASSERT_TRUE(Fetch(arena->handle()).ok());
  const auto again = Fetch(arena->handle());
  EXPECT_EQ(again.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(again.status().message().find("no arena waits for this handle"), std::string::npos);
  EXPECT_EQ(Say("GET / HTTP/1.1"), "not a greeting");
  EXPECT_EQ(Say(std::string(4096, 'x')), "not a greeting");
  EXPECT_EQ(Say(std::string(kArenaGreeting, 8) + std::string(15, 'x')), "not a greeting");
  EXPECT_TRUE(Fetch(Open()->handle()).ok());  // it still serves
}

TEST_F(ArenaSocketTest, OnlyTheOwnUserMayCome) {
  struct stat info;
  ASSERT_EQ(stat(path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  if (geteuid() != 0) GTEST_SKIP() << "needs root to be another user";
  // The directory's mode keeps others out; were it open, the credentials would.
  chmod(directory_.c_str(), 0755);
  chmod(path().c_str(), 0666);
  const std::string handle = Open()->handle();
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
    const auto received = Fetch(handle);
    const bool refused = received.status().code() == absl::StatusCode::kPermissionDenied &&
                         received.status().message().find("user 65534 may not") !=
                             absl::string_view::npos;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(table_.attached(), 0);
}

TEST_F(ArenaSocketTest, SilentPeersDontKeepOthersOut) {
  std::vector<Descriptor> silent;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path().c_str());
  for (int i = 0; i < 20; ++i) {
    silent.emplace_back(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(silent.back().get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
              0);
  }
  EXPECT_TRUE(Fetch(Open()->handle()).ok());
}

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

std::int64_t MappedPages() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages;
  return pages;
}

TEST_F(ArenaSocketTest, AThousandAttachesLeaveMemoryAndDescriptorsFlat) {
  const auto round = [this] {
    auto arena = Open();
    auto received = Fetch(arena->handle());
    ASSERT_TRUE(received.ok()) << received.status();
    auto memory = ArenaMemory::Map(std::move(received->memory), arena->layout().bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    std::memset(memory->data(), 1, static_cast<std::size_t>(memory->bytes()));
  };
  const auto idle = [this] { return table_.attached() == 0 && table_.bytes() == 0; };
  for (int i = 0; i < 50; ++i) round();
  ASSERT_TRUE(Eventually(idle));
  const int descriptors = OpenDescriptors();
  const std::int64_t pages = MappedPages();
  for (int i = 0; i < 1000; ++i) round();
  EXPECT_TRUE(Eventually(idle));
  EXPECT_LE(OpenDescriptors(), descriptors + 2);
  EXPECT_LE(MappedPages(), pages + 1024);  // 4 MiB; each round mapped 264 KiB
}

}  // namespace
}  // namespace muond
