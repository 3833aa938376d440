#include "tests/support/raw_trainer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "grpcpp/grpcpp.h"
#include "proto/convert.h"
#include "proto/crc32c.h"
#include "proto/status.h"

namespace muond::cluster {
namespace {

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
}

}  // namespace

RawTrainer::RawTrainer(std::shared_ptr<grpc::Channel> channel, std::string run, std::int64_t rank,
                       std::int64_t generation)
    : stub_(v1::Optimizer::NewStub(channel)),
      run_(std::move(run)),
      rank_(rank),
      generation_(generation) {}

v1::RunId RawTrainer::id() const {
  v1::RunId id;
  id.set_run(run_);
  id.set_generation(generation_);
  return id;
}

absl::Status RawTrainer::Told(const grpc::Status& status, const grpc::ClientContext& context) {
  if (!status.ok()) position_ = PositionFrom(context);
  return FromGrpc(status);
}

template <typename Request, typename Reply>
absl::StatusOr<Reply> RawTrainer::Call(
    grpc::Status (v1::Optimizer::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
    const Request& request) {
  grpc::ClientContext context;
  SetDeadline(context);
  Reply reply;
  absl::Status status = Told((stub_.get()->*method)(&context, request, &reply), context);
  if (!status.ok()) return status;
  return reply;
}

v1::RegisterRequest RawTrainer::RegisterRequestOf(const RunSpec& spec,
                                                  const RankSlices& slices) const {
  v1::RegisterRequest request;
  *request.mutable_run() = ToProto(spec);
  request.set_rank(rank_);
  SlicesToProto(slices, request.mutable_slices());
  return request;
}

absl::StatusOr<v1::RegisterReply> RawTrainer::Register(const v1::RegisterRequest& request) {
  return Call(&v1::Optimizer::Stub::Register, request);
}

absl::StatusOr<v1::InitializeReply> RawTrainer::Initialize(const std::vector<v1::Chunk>& chunks) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::InitializeReply reply;
  const auto writer = stub_->Initialize(&context, &reply);
  v1::InitializeRequest request;
  *request.mutable_id() = id();
  request.set_rank(rank_);
  for (const v1::Chunk& chunk : chunks) {
    *request.mutable_chunk() = chunk;
    if (!writer->Write(request)) break;
    request.Clear();
  }
  if (chunks.empty()) writer->Write(request);
  writer->WritesDone();
  absl::Status status = Told(writer->Finish(), context);
  if (!status.ok()) return status;
  return reply;
}

absl::StatusOr<v1::PushReply> RawTrainer::Push(std::int64_t step,
                                               const std::vector<v1::Chunk>& chunks) {
  grpc::ClientContext context;
  SetDeadline(context);
  v1::PushReply reply;
  const auto writer = stub_->Push(&context, &reply);
  v1::PushRequest request;
  *request.mutable_id() = id();
  request.set_rank(rank_);
  request.set_step(step);
  for (const v1::Chunk& chunk : chunks) {
    *request.mutable_chunk() = chunk;
    if (!writer->Write(request)) break;
    request.Clear();
  }
  if (chunks.empty()) writer->Write(request);
  writer->WritesDone();
  absl::Status status = Told(writer->Finish(), context);
  if (!status.ok()) return status;
  return reply;
}

v1::BeginRequest RawTrainer::BeginRequestOf(std::int64_t step, double loss_scale) const {
  v1::BeginRequest request;
  *request.mutable_id() = id();
  request.set_rank(rank_);
  request.set_step(step);
  request.set_loss_scale(loss_scale);
  return request;
}

absl::Status RawTrainer::Begin(const v1::BeginRequest& request) {
  return Call(&v1::Optimizer::Stub::Begin, request).status();
}

absl::StatusOr<v1::StepOutcome> RawTrainer::Finish(std::int64_t step,
                                                   const std::vector<std::string>& absent,
                                                   std::int64_t wait_ms) {
  v1::FinishRequest request;
  *request.mutable_id() = id();
  request.set_rank(rank_);
  request.set_step(step);
  for (const std::string& name : absent) request.add_absent(name);
  request.set_wait_ms(wait_ms);
  const auto reply = Call(&v1::Optimizer::Stub::Finish, request);
  if (!reply.ok()) return reply.status();
  return reply->outcome();
}

absl::StatusOr<v1::StepOutcome> RawTrainer::Skip(std::int64_t step, v1::SkipCause cause,
                                                 double loss_scale) {
  v1::SkipRequest request;
  *request.mutable_id() = id();
  request.set_rank(rank_);
  request.set_step(step);
  request.set_cause(cause);
  request.set_loss_scale(loss_scale);
  const auto reply = Call(&v1::Optimizer::Stub::Skip, request);
  if (!reply.ok()) return reply.status();
  return reply->outcome();
}

absl::StatusOr<std::vector<v1::PullReply>> RawTrainer::Pull(const v1::PullRequest& request) {
  grpc::ClientContext context;
  SetDeadline(context);
  const auto reader = stub_->Pull(&context, request);
  std::vector<v1::PullReply> replies;
  for (v1::PullReply reply; reader->Read(&reply);) replies.push_back(reply);
  absl::Status status = Told(reader->Finish(), context);
  if (!status.ok()) return status;
  return replies;
}

absl::StatusOr<v1::CloseReply> RawTrainer::Close() {
  v1::CloseRequest request;
  *request.mutable_id() = id();
  request.set_rank(rank_);
  return Call(&v1::Optimizer::Stub::Close, request);
}

v1::Chunk ChunkOf(const std::string& parameter, std::int64_t slice, std::int64_t offset,
                  std::string bytes, v1::Dtype dtype) {
  v1::Chunk chunk;
  chunk.set_parameter(parameter);
  chunk.set_slice(slice);
  chunk.set_dtype(dtype);
  chunk.set_offset(offset);
  chunk.set_crc32c(Crc32c(bytes.data(), bytes.size()));
  chunk.set_data(std::move(bytes));
  return chunk;
}

std::vector<v1::Chunk> ChunksOf(const std::string& parameter, std::int64_t slice,
                                const std::string& bytes, std::int64_t chunk_bytes, Dtype dtype) {
  const auto size = static_cast<std::int64_t>(DtypeBytes(dtype));
  const std::int64_t step = std::max(chunk_bytes / size, std::int64_t{1}) * size;
  std::vector<v1::Chunk> chunks;
  for (std::int64_t at = 0; at < std::ssize(bytes); at += step) {
    chunks.push_back(ChunkOf(parameter, slice, at / size, bytes.substr(at, step), ToProto(dtype)));
  }
  return chunks;
}

std::string Bytes(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

}  // namespace muond::cluster
