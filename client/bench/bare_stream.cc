#include "client/bench/bare_stream.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/bench/statistics.h"
#include "client/cpp/connection.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/sync_stream.h"
#include "proto/channel.h"
#include "proto/check.h"
#include "proto/status.h"

namespace muond::bench {
namespace {

using Clock = std::chrono::steady_clock;
using grpc::internal::RpcMethod;

constexpr char kTake[] = "/muond.bench.Bare/Take";
constexpr char kGive[] = "/muond.bench.Bare/Give";
constexpr int kRepetitions = 3;

// What a Give call asks for, as the bytes of its one message.
struct Wanted {
  std::int64_t messages = 0;
  std::int64_t chunk_bytes = 0;
};

grpc::ByteBuffer BufferOf(const void* data, std::size_t bytes) {
  const grpc::Slice slice(data, bytes);
  return {&slice, 1};
}

// Reads to the end, answers with an empty message.
class Taker final : public grpc::ServerGenericBidiReactor {
 public:
  Taker() { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    if (ok) return StartRead(&message_);
    answer_ = BufferOf("", 0);
    StartWriteAndFinish(&answer_, grpc::WriteOptions(), grpc::Status::OK);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer message_, answer_;
};

// Reads what is wanted, writes it: one buffer, made once.
class Giver final : public grpc::ServerGenericBidiReactor {
 public:
  Giver() { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    grpc::Slice slice;
    if (!ok || !message_.DumpToSingleSlice(&slice).ok() || slice.size() != sizeof(wanted_)) {
      return Finish({grpc::StatusCode::INVALID_ARGUMENT, "not a request for a bare stream"});
    }
    std::memcpy(&wanted_, slice.begin(), sizeof(wanted_));
    const std::vector<char> chunk(static_cast<std::size_t>(wanted_.chunk_bytes), 1);
    message_ = BufferOf(chunk.data(), chunk.size());
    Next();
  }
  void OnWriteDone(bool ok) override {
    if (ok) return Next();
    Finish({grpc::StatusCode::CANCELLED, "the caller went away"});
  }
  void OnDone() override { delete this; }

 private:
  void Next() {
    if (wanted_.messages-- == 0) return Finish(grpc::Status::OK);
    StartWrite(&message_);
  }
  grpc::ByteBuffer message_;
  Wanted wanted_;
};

absl::Status Push(grpc::Channel& channel, std::int64_t messages, const grpc::ByteBuffer& chunk) {
  grpc::ClientContext context;
  grpc::ByteBuffer reply;
  const RpcMethod method(kTake, RpcMethod::CLIENT_STREAMING);
  const std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> writer(
      grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(&channel, method, &context,
                                                                    &reply));
  for (std::int64_t i = 0; i < messages && writer->Write(chunk); ++i) {
  }
  writer->WritesDone();
  return FromGrpc(writer->Finish());
}

absl::Status Pull(grpc::Channel& channel, const Wanted& wanted) {
  grpc::ClientContext context;
  const grpc::ByteBuffer request = BufferOf(&wanted, sizeof(wanted));
  const RpcMethod method(kGive, RpcMethod::SERVER_STREAMING);
  const std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> reader(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(&channel, method, &context,
                                                                    request));
  std::int64_t bytes = 0;
  for (grpc::ByteBuffer message; reader->Read(&message);) {
    bytes += static_cast<std::int64_t>(message.Length());
  }
  MUOND_RETURN_IF_ERROR(FromGrpc(reader->Finish()));
  if (bytes == wanted.messages * wanted.chunk_bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("bare stream: expected %d bytes, got %d",
                                             wanted.messages * wanted.chunk_bytes, bytes));
}

// Median seconds of `call`; the first call warms up.
template <typename Call>
absl::StatusOr<double> Time(const Call& call) {
  std::vector<double> seconds;
  for (int i = 0; i <= kRepetitions; ++i) {
    const Clock::time_point start = Clock::now();
    MUOND_RETURN_IF_ERROR(call());
    if (i > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return Summarize(seconds).median;
}

}  // namespace

class BareStreamServer::Service final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    if (context->method() == kTake) return new Taker;
    if (context->method() == kGive) return new Giver;
    return CallbackGenericService::CreateReactor(context);  // UNIMPLEMENTED
  }
};

BareStreamServer::BareStreamServer() : service_(std::make_unique<Service>()) {}

BareStreamServer::~BareStreamServer() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

absl::StatusOr<std::unique_ptr<BareStreamServer>> BareStreamServer::Start(
    const std::string& address) {
  std::unique_ptr<BareStreamServer> bare(new BareStreamServer());
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterCallbackGenericService(bare->service_.get());
  bare->server_ = builder.BuildAndStart();
  if (bare->server_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrFormat("bare stream: cannot listen on %s", address));
  }
  bare->port_ = port;
  return bare;
}

absl::StatusOr<BareStreamRates> MeasureBareStream(const std::shared_ptr<grpc::Channel>& channel,
                                                  std::int64_t chunk_bytes,
                                                  std::int64_t total_bytes) {
  const Wanted wanted{(total_bytes + chunk_bytes - 1) / chunk_bytes, chunk_bytes};
  const auto bytes = static_cast<double>(wanted.messages * chunk_bytes);
  const std::vector<char> payload(static_cast<std::size_t>(chunk_bytes), 1);
  const grpc::ByteBuffer chunk = BufferOf(payload.data(), payload.size());
  MUOND_ASSIGN_OR_RETURN(const double push,
                         Time([&] { return Push(*channel, wanted.messages, chunk); }));
  MUOND_ASSIGN_OR_RETURN(const double pull, Time([&] { return Pull(*channel, wanted); }));
  return BareStreamRates{bytes / push, bytes / pull};
}

absl::StatusOr<BareStreamRates> MeasureBareStreamOfProcess(const std::string& program,
                                                           std::int64_t chunk_bytes,
                                                           std::int64_t total_bytes) {
  char folder[] = "/tmp/muond-bench-XXXXXX";
  int input[2];
  if (mkdtemp(folder) == nullptr || pipe2(input, O_CLOEXEC) != 0) {
    return absl::UnavailableError("bare stream: cannot make a socket's folder or a pipe");
  }
  const std::string socket = std::string(folder) + "/bare.sock";
  std::string arguments[] = {program, "--serve-bare-stream", socket};
  char* argv[] = {arguments[0].data(), arguments[1].data(), arguments[2].data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(input[0]);
  absl::StatusOr<BareStreamRates> rates =
      absl::UnavailableError(absl::StrFormat("bare stream: cannot run %s", program));
  if (error == 0) {
    const auto channel =
        MakeChannel("unix:" + socket, chunk_bytes + client::kMessageHeaderBytes);
    if (channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10))) {
      rates = MeasureBareStream(channel, chunk_bytes, total_bytes);
    }
  }
  close(input[1]);  // the child ends
  if (error == 0) waitpid(pid, nullptr, 0);
  unlink(socket.c_str());
  rmdir(folder);
  return rates;
}

int ServeBareStream(const std::string& socket) {
  const auto server = BareStreamServer::Start("unix:" + socket);
  if (!server.ok()) return 1;
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  return 0;
}

}  // namespace muond::bench
