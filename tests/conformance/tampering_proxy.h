// A service between a trainer and a daemon that passes every call on, and does to the messages of
// Push and the pulls what a test tells it to. An arena's memory goes past it: of those paths it has
// only what is said about the memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.grpc.pb.h"

namespace muond::conformance {

class TamperingProxy {
 public:
  // Passes on to the daemon at that channel.
  explicit TamperingProxy(std::shared_ptr<grpc::Channel> daemon);
  ~TamperingProxy();
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port_); }

  // What becomes of a message: nothing, one or several of them. Called with messages that carry
  // chunks only.
  using Push = std::function<std::vector<v1::PushRequest>(const v1::PushRequest&)>;
  using Pull = std::function<std::vector<v1::PullReply>(const v1::PullReply&)>;
  void TamperPush(Push tamper);
  void TamperPull(Pull tamper);
  // Push is answered as if all had come, and nothing is passed on.
  void SwallowPushes(bool swallow);

 private:
  class Passer;
  std::unique_ptr<Passer> passer_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace muond::conformance
