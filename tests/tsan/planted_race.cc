// A race that ThreadSanitizer must find, and its cure that must stay silent: the proof that a clean
// tsan run means something. Handlers of a real in-process gRPC server count their calls.
//
//   planted_race racy      unguarded counter: one report naming Count(), exit code 66
//   planted_race guarded   the same counter under a mutex: no report, exit code 0

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.grpc.pb.h"

namespace {

class CountingService : public muond::v1::Optimizer::Service {
 public:
  explicit CountingService(bool guarded) : guarded_(guarded) {}

  grpc::Status Status(grpc::ServerContext*, const muond::v1::StatusRequest*,
                      muond::v1::StatusReply*) override {
    if (guarded_) {
      absl::MutexLock lock(&mutex_);
      Count();
    } else {
      Count();
    }
    return grpc::Status::OK;
  }

 private:
  void Count() { ++calls_; }

  const bool guarded_;
  absl::Mutex mutex_;
  long calls_ = 0;
};

void CallManyTimes(grpc::Server& server, int calls) {
  auto stub = muond::v1::Optimizer::NewStub(server.InProcessChannel(grpc::ChannelArguments()));
  for (int i = 0; i < calls; ++i) {
    grpc::ClientContext context;
    muond::v1::StatusReply reply;
    if (!stub->Status(&context, {}, &reply).ok()) std::fputs("call failed\n", stderr);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  CountingService service(std::strcmp(argv[1], "guarded") == 0);
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) clients.emplace_back([&] { CallManyTimes(*server, 50); });
  for (std::thread& client : clients) client.join();
  server->Shutdown();
  return 0;
}
