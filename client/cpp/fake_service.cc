#include "client/cpp/fake_service.h"

#include <algorithm>
#include <chrono>

#include "absl/time/clock.h"
#include "proto/crc32c.h"
#include "proto/status.h"

namespace muond::client {

FakeService::FakeService() {
  position.set_generation(1);
  position.set_state(v1::RUN_STATE_RUNNING);
}

bool FakeService::Held(const std::string& verb, Context* context) {
  {
    MutexLock lock(mutex);
    if (!hold.contains(verb)) return false;
  }
  ++held;
  while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
  return true;
}

std::optional<grpc::Status> FakeService::Enter(const std::string& verb, Context* context) {
  ++calls[verb];
  peers[verb] = context->peer();
  auto& queue = failures[verb];
  if (queue.empty() || queue.front().after_effect) return std::nullopt;
  return Leave(verb, context);
}

grpc::Status FakeService::Leave(const std::string& verb, Context* context) {
  auto& queue = failures[verb];
  if (queue.empty()) return grpc::Status::OK;
  const Failure failure = queue.front();
  queue.pop_front();
  if (failure.position.has_value()) AttachPosition(*failure.position, context);
  return failure.status;
}

bool FakeService::Store(const v1::Chunk& chunk,
                        std::map<std::pair<std::string, std::int64_t>, std::string>& into) {
  if (Crc32c(chunk.data().data(), chunk.data().size()) != chunk.crc32c()) return false;
  largest_chunk = std::max(largest_chunk, static_cast<std::int64_t>(chunk.data().size()));
  std::string& bytes = into[{chunk.parameter(), chunk.slice()}];
  if (chunk.offset() == 0) bytes.clear();
  bytes += chunk.data();
  return true;
}

grpc::Status FakeService::Register(Context* context, const v1::RegisterRequest* request,
                                   v1::RegisterReply* reply) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Register", context)) return *failure;
  registered = *request;
  if (!later.empty()) {
    position = later.front();
    later.pop_front();
  }
  reply->set_version(version);
  reply->mutable_additions()->Assign(additions.begin(), additions.end());
  *reply->mutable_position() = position;
  reply->set_loss_scale(position.has_last_outcome() ? position.last_outcome().next_loss_scale()
                                                    : request->run().loss_scale().initial());
  reply->set_max_chunk_bytes(max_chunk_bytes);
  return Leave("Register", context);
}

grpc::Status FakeService::Initialize(Context* context,
                                     grpc::ServerReader<v1::InitializeRequest>* stream,
                                     v1::InitializeReply* reply) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Initialize", context)) return *failure;
  std::map<std::pair<std::string, std::int64_t>, std::string> arrived;
  for (v1::InitializeRequest message; stream->Read(&message);) {
    if (!message.has_chunk()) continue;
    if (!Store(message.chunk(), arrived)) return {grpc::StatusCode::DATA_LOSS, "crc"};
  }
  for (auto& [id, bytes] : arrived) values[id] = bytes;
  reply->set_slices_accepted(static_cast<std::int64_t>(arrived.size()));
  reply->set_complete(true);
  return Leave("Initialize", context);
}

grpc::Status FakeService::Begin(Context* context, const v1::BeginRequest* request,
                                v1::BeginReply* reply) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Begin", context)) return *failure;
  begun.push_back(*request);
  *reply->mutable_position() = position;
  return Leave("Begin", context);
}

grpc::Status FakeService::Push(Context* context, grpc::ServerReader<v1::PushRequest>* stream,
                               v1::PushReply* reply) {
  if (Held("Push", context)) return grpc::Status::CANCELLED;
  MutexLock lock(mutex);
  if (auto failure = Enter("Push", context)) return *failure;
  std::map<std::pair<std::string, std::int64_t>, std::string> arrived;
  std::int64_t bytes = 0;
  for (v1::PushRequest message; stream->Read(&message);) {
    if (!Store(message.chunk(), arrived)) return {grpc::StatusCode::DATA_LOSS, "crc"};
    bytes += static_cast<std::int64_t>(message.chunk().data().size());
  }
  for (auto& [id, data] : arrived) {
    const bool duplicate = gradients.contains(id) && gradients[id] == data;
    gradients[id] = data;
    if (duplicate) {
      reply->set_slices_duplicate(reply->slices_duplicate() + 1);
    } else {
      reply->set_slices_accepted(reply->slices_accepted() + 1);
    }
  }
  reply->set_bytes(bytes);
  return Leave("Push", context);
}

grpc::Status FakeService::Finish(Context* context, const v1::FinishRequest* request,
                                 v1::FinishReply* reply) {
  const auto left = context->deadline() - std::chrono::system_clock::now();
  if (hang_finish) {
    // Not all of it: how little a client may leave for the way back is another test's.
    absl::SleepFor(absl::Milliseconds(request->wait_ms() / 2));
    return {grpc::StatusCode::DEADLINE_EXCEEDED, "run \"r\": step 0: rank 1 has not finished"};
  }
  MutexLock lock(mutex);
  finish_deadline_ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
  if (auto failure = Enter("Finish", context)) return *failure;
  finished = *request;
  if (request->step() == position.next_step()) {
    v1::StepOutcome& outcome = *position.mutable_last_outcome();
    outcome.set_step(request->step());
    outcome.set_applied(true);
    outcome.set_applied_steps(outcome.applied_steps() + 1);
    outcome.set_next_loss_scale(512);
    outcome.set_version(request->step() + 1);
    position.set_next_step(request->step() + 1);
  }
  *reply->mutable_outcome() = position.last_outcome();
  return Leave("Finish", context);
}

grpc::Status FakeService::Skip(Context* context, const v1::SkipRequest* request,
                               v1::FinishReply* reply) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Skip", context)) return *failure;
  reply->mutable_outcome()->set_step(request->step());
  reply->mutable_outcome()->set_cause(request->cause());
  reply->mutable_outcome()->set_loss_scale(request->loss_scale());
  reply->mutable_outcome()->set_version(request->step() + 1);
  return Leave("Skip", context);
}

grpc::Status FakeService::AddParameters(Context* context, const v1::AddParametersRequest*,
                                        v1::AddParametersReply* reply) {
  if (Held("AddParameters", context)) return grpc::Status::CANCELLED;
  MutexLock lock(mutex);
  if (auto failure = Enter("AddParameters", context)) return *failure;
  reply->set_addition("addition");
  reply->set_adopted(adopted);
  return Leave("AddParameters", context);
}

grpc::Status FakeService::Pull(Context* context, const v1::PullRequest* request,
                               grpc::ServerWriter<v1::PullReply>* stream) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Pull", context)) return *failure;
  std::vector<v1::PullReply> messages;
  for (const auto& wanted : request->slices()) {
    for (int box = 0; box < wanted.boxes_size(); ++box) {
      // The box that was registered under this index holds the values.
      std::int64_t slice = 0;
      for (const auto& held : registered.slices()) {
        if (held.parameter() != wanted.parameter()) continue;
        while (held.boxes(static_cast<int>(slice)).SerializeAsString() !=
               wanted.boxes(box).SerializeAsString()) {
          ++slice;
        }
      }
      const std::string& bytes = values.at({wanted.parameter(), slice});
      const auto chunk_bytes = static_cast<std::size_t>(request->chunk_bytes());
      for (std::size_t at = 0; at < bytes.size(); at += chunk_bytes) {
        v1::PullReply& message = messages.emplace_back();
        message.set_version(request->version());
        v1::Chunk& chunk = *message.mutable_chunk();
        chunk.set_parameter(wanted.parameter());
        chunk.set_slice(box);
        chunk.set_offset(static_cast<std::int64_t>(at / 4));  // the tests' tensors are fp32
        chunk.set_data(bytes.substr(at, chunk_bytes));
        chunk.set_crc32c(Crc32c(chunk.data().data(), chunk.data().size()));
      }
    }
  }
  if (tamper) tamper(messages);
  for (const auto& message : messages) {
    if (!stream->Write(message)) break;
  }
  return Leave("Pull", context);
}

grpc::Status FakeService::Close(Context* context, const v1::CloseRequest*, v1::CloseReply* reply) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Close", context)) return *failure;
  reply->set_closed(true);
  return Leave("Close", context);
}

grpc::Status FakeService::Status(Context* context, const v1::StatusRequest* request,
                                 v1::StatusReply* reply) {
  MutexLock lock(mutex);
  if (auto failure = Enter("Status", context)) return *failure;
  reply->set_version("fake");
  reply->add_runs()->set_run(request->run());
  return grpc::Status::OK;
}

grpc::Status FakeService::DescribeParameters(Context*, const v1::DescribeParametersRequest* request,
                                             v1::DescribeParametersReply* reply) {
  for (const std::string& name : request->names()) {
    reply->add_parameters()->mutable_parameter()->set_name(name);
  }
  return grpc::Status::OK;
}

grpc::Status FakeService::Digest(Context*, const v1::DigestRequest* request,
                                 v1::DigestReply* reply) {
  reply->set_tensor_digest(request->per_parameter() ? "each" : "whole");
  return grpc::Status::OK;
}

FakeServer::FakeServer(bool listen) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  if (listen) {
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  }
  server_ = builder.BuildAndStart();
}

FakeServer::~FakeServer() {
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

std::shared_ptr<grpc::Channel> FakeServer::channel() {
  return server_->InProcessChannel(grpc::ChannelArguments());
}

}  // namespace muond::client
