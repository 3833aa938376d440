#include "tests/conformance/tampering_proxy.h"

#include <set>
#include <tuple>
#include <utility>

#include "proto/mutex.h"

namespace muond::conformance {
namespace {

using Context = grpc::ServerContext;

// What the daemon told beside its status.
grpc::Status PassOn(const grpc::Status& status, const grpc::ClientContext& from, Context* to) {
  for (const auto& [key, value] : from.GetServerTrailingMetadata()) {
    to->AddTrailingMetadata(std::string(key.data(), key.size()),
                            std::string(value.data(), value.size()));
  }
  return status;
}

}  // namespace

class TamperingProxy::Passer final : public v1::Optimizer::Service {
 public:
  explicit Passer(std::shared_ptr<grpc::Channel> daemon)
      : stub_(v1::Optimizer::NewStub(std::move(daemon))) {}

  Mutex mutex;
  TamperingProxy::Push push MUOND_GUARDED_BY(mutex);
  TamperingProxy::Pull pull MUOND_GUARDED_BY(mutex);
  bool swallow MUOND_GUARDED_BY(mutex) = false;

 private:
  template <typename Request, typename Reply>
  grpc::Status Unary(grpc::Status (v1::Optimizer::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Reply*),
                     Context* context, const Request* request, Reply* reply) {
    grpc::ClientContext client;
    client.set_deadline(context->deadline());
    return PassOn((stub_.get()->*method)(&client, *request, reply), client, context);
  }
#define MUOND_PASS(Method)                                                             \
  grpc::Status Method(Context* context, const v1::Method##Request* request,            \
                      v1::Method##Reply* reply) override {                             \
    return Unary(&v1::Optimizer::Stub::Method, context, request, reply);               \
  }
  MUOND_PASS(Register)
  MUOND_PASS(Begin)
  MUOND_PASS(Finish)
  MUOND_PASS(Close)
  MUOND_PASS(OpenArena)
  MUOND_PASS(CloseArena)
#undef MUOND_PASS

  grpc::Status Initialize(Context* context, grpc::ServerReader<v1::InitializeRequest>* reader,
                          v1::InitializeReply* reply) override {
    grpc::ClientContext client;
    client.set_deadline(context->deadline());
    const auto writer = stub_->Initialize(&client, reply);
    for (v1::InitializeRequest message; reader->Read(&message);) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    return PassOn(writer->Finish(), client, context);
  }

  grpc::Status Push(Context* context, grpc::ServerReader<v1::PushRequest>* reader,
                    v1::PushReply* reply) override {
    if (Swallows()) return Swallow(reader, reply);
    grpc::ClientContext client;
    client.set_deadline(context->deadline());
    const auto writer = stub_->Push(&client, reply);
    bool writable = true;
    for (v1::PushRequest message; writable && reader->Read(&message);) {
      for (const v1::PushRequest& changed : Tampered(message)) {
        writable = writable && writer->Write(changed);
      }
    }
    writer->WritesDone();
    return PassOn(writer->Finish(), client, context);
  }

  bool Swallows() {
    MutexLock lock(mutex);
    return swallow;
  }
  std::vector<v1::PushRequest> Tampered(const v1::PushRequest& message) {
    MutexLock lock(mutex);
    return push == nullptr ? std::vector{message} : push(message);
  }
  std::vector<v1::PullReply> Tampered(const v1::PullReply& message) {
    MutexLock lock(mutex);
    return pull == nullptr ? std::vector{message} : pull(message);
  }

  // The answer that a daemon would give. Of an arena more than its windows can't be swallowed: the
  // trainer waits for their fences. Tests push less.
  static grpc::Status Swallow(grpc::ServerReader<v1::PushRequest>* reader, v1::PushReply* reply) {
    std::set<std::tuple<std::string, std::int64_t, std::int64_t>> slices;
    std::int64_t bytes = 0;
    const auto count = [&](const v1::Chunk& chunk) {
      slices.insert({chunk.parameter(), chunk.slice(), chunk.micro_batch()});
      bytes += static_cast<std::int64_t>(chunk.data().size()) + chunk.region().bytes();
    };
    for (v1::PushRequest message; reader->Read(&message);) {
      if (message.has_chunk()) count(message.chunk());
      for (const v1::Chunk& chunk : message.fill().chunks()) count(chunk);
    }
    reply->set_slices_accepted(static_cast<std::int64_t>(slices.size()));
    reply->set_bytes(bytes);
    return grpc::Status::OK;
  }

  grpc::Status Pull(Context* context, const v1::PullRequest* request,
                    grpc::ServerWriter<v1::PullReply>* writer) override {
    grpc::ClientContext client;
    client.set_deadline(context->deadline());
    const auto reader = stub_->Pull(&client, *request);
    for (v1::PullReply message; reader->Read(&message);) {
      for (const v1::PullReply& changed : Tampered(message)) writer->Write(changed);
    }
    return PassOn(reader->Finish(), client, context);
  }

  grpc::Status PullArena(
      Context* context,
      grpc::ServerReaderWriter<v1::PullReply, v1::PullArenaRequest>* trainer) override {
    grpc::ClientContext client;
    client.set_deadline(context->deadline());
    const auto daemon = stub_->PullArena(&client);
    v1::PullArenaRequest request;
    if (trainer->Read(&request)) daemon->Write(request);
    // One window at a time: the trainer answers each message with the window that it has read.
    bool heard = true;
    for (v1::PullReply message; heard && daemon->Read(&message);) {
      const std::vector<v1::PullReply> replies = Tampered(message);
      if (replies.empty()) Release(message, *daemon);
      for (const v1::PullReply& changed : replies) {
        heard = heard && trainer->Write(changed) && trainer->Read(&request);
        if (heard) daemon->Write(request);
      }
    }
    if (!heard) client.TryCancel();  // the trainer is gone
    return PassOn(daemon->Finish(), client, context);
  }

  // A window that the trainer never hears of would be missing for ever.
  static void Release(const v1::PullReply& reply,
                      grpc::ClientReaderWriter<v1::PullArenaRequest, v1::PullReply>& daemon) {
    v1::PullArenaRequest release;
    release.set_window(reply.fill().window());
    release.set_sequence(reply.fill().sequence());
    daemon.Write(release);
  }

  const std::unique_ptr<v1::Optimizer::Stub> stub_;
};

TamperingProxy::TamperingProxy(std::shared_ptr<grpc::Channel> daemon)
    : passer_(std::make_unique<Passer>(std::move(daemon))) {
  grpc::ServerBuilder builder;
  builder.RegisterService(passer_.get());
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  server_ = builder.BuildAndStart();
}

TamperingProxy::~TamperingProxy() { server_->Shutdown(std::chrono::system_clock::now()); }

void TamperingProxy::TamperPush(Push tamper) {
  MutexLock lock(passer_->mutex);
  passer_->push = std::move(tamper);
}

void TamperingProxy::TamperPull(Pull tamper) {
  MutexLock lock(passer_->mutex);
  passer_->pull = std::move(tamper);
}

void TamperingProxy::SwallowPushes(bool swallow) {
  MutexLock lock(passer_->mutex);
  passer_->swallow = swallow;
}

}  // namespace muond::conformance
