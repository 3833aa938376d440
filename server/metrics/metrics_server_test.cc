#include "server/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/worker_stack.h"

namespace muond {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// A connected socket, -1 on failure.
int Connect(const std::string& address) {
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(static_cast<std::uint16_t>(port));
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)) == 0) return fd;
  close(fd);
  return -1;
}

// One request over a plain socket; the whole answer, headers included.
std::string Ask(const std::string& address, const std::string& request) {
  const int fd = Connect(address);
  std::string answer;
  if (send(fd, request.data(), request.size(), 0) == static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) answer.append(buffer, got);
  }
  close(fd);
  return answer;
}

std::string Get(const std::string& address, const std::string& path) {
  return Ask(address, "GET " + path + " HTTP/1.0\r\n\r\n");
}

class MetricsServerTest : public testing::Test {
 protected:
  // One server for all: civetweb takes a second to stop.
  static void SetUpTestSuite() {
    auto server = MetricsServer::Start("127.0.0.1:0", &metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  static void TearDownTestSuite() { server_.reset(); }

  static inline DaemonMetrics metrics_{{"0.1.0", "abc", "none", "g++ 12"}};
  static inline std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, TakesAFreePortAndTellsWhich) {
  EXPECT_THAT(server_->address(), StartsWith("127.0.0.1:"));
  EXPECT_THAT(server_->address(), Not(HasSubstr(":0")));
}

TEST_F(MetricsServerTest, AnswersScrapesWithTheExpositionAndNothingElse) {
  const auto run = metrics_.OpenRun({.run = "r"});
  const std::string answer = Get(server_->address(), "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("\nmuond_run_active{run=\"r\"} 1\n"));
  EXPECT_THAT(answer, Not(HasSubstr("exposer_")));
}

TEST_F(MetricsServerTest, AnswersProbes) {
  EXPECT_THAT(Get(server_->address(), "/healthz"), StartsWith("HTTP/1.1 200"));
  metrics_.SetReady(false);
  EXPECT_THAT(Get(server_->address(), "/readyz"), StartsWith("HTTP/1.1 503"));
  metrics_.SetReady(true);
  EXPECT_THAT(Get(server_->address(), "/readyz"), StartsWith("HTTP/1.1 200"));
}

TEST_F(MetricsServerTest, RefusesWhatItDoesNotServe) {
  EXPECT_THAT(Get(server_->address(), "/"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Get(server_->address(), "/metrics/../../etc/passwd"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(server_->address(), "POST /metrics HTTP/1.0\r\nContent-Length: 0\r\n\r\n"),
              StartsWith("HTTP/1.1 405"));
}

// True when /healthz was answered while eight idle connections were still open.
bool AnswersBesideIdleConnections(const std::string& address) {
  std::vector<int> idle;
  for (int i = 0; i < 8; ++i) idle.push_back(Connect(address));
  const bool answered = Get(address, "/healthz").rfind("HTTP/1.1 200", 0) == 0;
  bool open = true;
  for (const int fd : idle) {
    char byte;
    open = open && fd >= 0 && recv(fd, &byte, 1, MSG_DONTWAIT) == -1;
    close(fd);
  }
  return answered && open;
}

// A liveness probe must not fail since somebody left connections open. The server drops idle ones
// after a second, which a busy machine may let pass before it answers: three attempts.
TEST_F(MetricsServerTest, IdleConnectionsDoNotKeepProbesOut) {
  const std::string& address = server_->address();
  EXPECT_TRUE(AnswersBesideIdleConnections(address) || AnswersBesideIdleConnections(address) ||
              AnswersBesideIdleConnections(address));
}

TEST_F(MetricsServerTest, SaysWhyItCannotListen) {
  const auto second = MetricsServer::Start(server_->address(), &metrics_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
}

TEST_F(MetricsServerTest, RefusesAddressesOfAnotherForm) {
  for (const char* address : {"", "9470", ":9470", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http",
                              "127.0.0.1:70000", "127.0.0.1:0,9470", "127.0.0.1:9470s",
                              "example.org:9470", "127.0.0.1:-1"}) {
    EXPECT_EQ(MetricsServer::Start(address, &metrics_).status().code(),
              absl::StatusCode::kInvalidArgument) << address;
  }
}

// Civetweb asks for 100 KiB, of which OpenBLAS and the CUDA runtime take most for their
// thread-local storage: the first request ran over the end.
TEST(MetricsServer, ThreadsThatAskForLittleStackGetEnough) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers keep this function to themselves";
#endif
  GiveThreadsRoom();
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 100 * 1024), 0);
  std::size_t bytes = 0;
  ASSERT_EQ(pthread_attr_getstacksize(&attributes, &bytes), 0);
  EXPECT_GE(bytes, std::size_t{1} << 20);
  pthread_attr_destroy(&attributes);
}

}  // namespace
}  // namespace muond
