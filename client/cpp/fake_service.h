// A daemon for the client's tests: keeps slices as bytes, applies nothing, and fails, loses replies
// and tampers with chunks exactly as told.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/mutex.h"

namespace muond::client {

class FakeService final : public v1::Optimizer::Service {
 public:
  // What the next call of a verb does instead of succeeding.
  struct Failure {
    grpc::Status status;
    std::optional<v1::RunPosition> position;  // attached to the refusal
    bool after_effect = false;                // the call works, its reply is lost
  };

  // Everything below is for the test's thread between calls; `mutex` guards it during calls.
  Mutex mutex;
  std::map<std::string, std::deque<Failure>> failures;  // by verb: "Finish"
  std::map<std::string, int> calls;
  std::map<std::string, std::string> peers;             // of the last call
  v1::RunPosition position;
  std::deque<v1::RunPosition> later;  // each Register moves the run on to the first of them
  std::string version;                // that Register tells
  std::vector<std::int64_t> additions;  // likewise
  v1::RegisterRequest registered;
  std::vector<v1::BeginRequest> begun;
  v1::FinishRequest finished;
  std::int64_t finish_deadline_ms = 0;                  // left when Finish arrived
  std::int64_t max_chunk_bytes = 0;
  std::int64_t largest_chunk = 0;
  std::map<std::pair<std::string, std::int64_t>, std::string> values, gradients;
  // Changes the messages of a Pull before they are sent.
  std::function<void(std::vector<v1::PullReply>&)> tamper;
  // Calls of these verbs end only when their callers give them up; `held`: how many have come.
  std::set<std::string> hold;
  std::atomic<int> held = 0;
  bool adopted = false;  // that AddParameters tells
  bool hang_finish = false;  // answers within its wait_ms, as a daemon that misses ranks

  FakeService();

 private:
  using Context = grpc::ServerContext;

  grpc::Status Register(Context*, const v1::RegisterRequest*, v1::RegisterReply*) override;
  grpc::Status Initialize(Context*, grpc::ServerReader<v1::InitializeRequest>*,
                          v1::InitializeReply*) override;
  grpc::Status Begin(Context*, const v1::BeginRequest*, v1::BeginReply*) override;
  grpc::Status Push(Context*, grpc::ServerReader<v1::PushRequest>*, v1::PushReply*) override;
  grpc::Status Finish(Context*, const v1::FinishRequest*, v1::FinishReply*) override;
  grpc::Status Skip(Context*, const v1::SkipRequest*, v1::FinishReply*) override;
  grpc::Status AddParameters(Context*, const v1::AddParametersRequest*,
                             v1::AddParametersReply*) override;
  grpc::Status Pull(Context*, const v1::PullRequest*, grpc::ServerWriter<v1::PullReply>*) override;
  grpc::Status Close(Context*, const v1::CloseRequest*, v1::CloseReply*) override;
  grpc::Status Status(Context*, const v1::StatusRequest*, v1::StatusReply*) override;
  grpc::Status DescribeParameters(Context*, const v1::DescribeParametersRequest*,
                                  v1::DescribeParametersReply*) override;
  grpc::Status Digest(Context*, const v1::DigestRequest*, v1::DigestReply*) override;

  // Whether it was held, and its caller has gone. Without the lock.
  bool Held(const std::string& verb, Context* context);
  // Counts the call; the failure that it must show before its effect, if any.
  std::optional<grpc::Status> Enter(const std::string& verb, Context* context);
  // Likewise after it.
  grpc::Status Leave(const std::string& verb, Context* context);
  bool Store(const v1::Chunk& chunk,
             std::map<std::pair<std::string, std::int64_t>, std::string>& into);
};

// The service behind an in-process channel, and on 127.0.0.1 at a port of its own.
class FakeServer {
 public:
  explicit FakeServer(bool listen = false);
  ~FakeServer();
  FakeService service;
  std::shared_ptr<grpc::Channel> channel();
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port_); }
  grpc::Server& server() { return *server_; }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace muond::client
