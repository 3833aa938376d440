// What a hostile trainer may say of GPU memory, and what it gets.
#include <array>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "grpcpp/grpcpp.h"
#include "muond/v1/optimizer.grpc.pb.h"
#include "proto/status.h"
#include "tests/conformance/gpu_trainer.h"

namespace muond::conformance {
namespace {

using cluster::Must;
using muond::testing::FakeGpuDriver;
using ::testing::HasSubstr;

class Hostile : public ::testing::Test {
 protected:
  PathDaemon daemon_{WithDevices(1)};
  GpuTrainer trainer_{Ipc(daemon_, "cuda-ipc")};
  std::unique_ptr<v1::Optimizer::Stub> stub_ =
      v1::Optimizer::NewStub(grpc::CreateChannel(daemon_.unix_address(),
                                                 grpc::InsecureChannelCredentials()));

  v1::ExchangeRequest Request() {
    v1::ExchangeRequest request;
    request.mutable_id()->set_run("run");
    request.mutable_id()->set_generation(trainer_.session().generation());
    return request;
  }
  absl::Status Call(const v1::ExchangeRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    v1::ExchangeReply reply;
    return FromGrpc(stub_->Exchange(&context, request, &reply));
  }
  void StillWorks() {
    trainer_.Initialize();
    EXPECT_TRUE(Must(trainer_.session().Step({}, trainer_.Noise(5))).applied);
  }
};

TEST_F(Hostile, PointersFromAnotherProcessAreRefused) {
  v1::ExchangeRequest request = Request();
  v1::Chunk* chunk = request.mutable_fill()->add_chunks();
  chunk->set_parameter("norm");
  chunk->mutable_region()->set_offset(4096);
  chunk->mutable_region()->set_bytes(19 * 4);
  for (const int lease : {0, 1, 77}) {
    request.mutable_fill()->set_sequence(lease);
    EXPECT_EQ(Call(request).code(), absl::StatusCode::kPermissionDenied);
  }
  request.clear_fill();
  request.mutable_pull()->mutable_pull();
  EXPECT_EQ(Call(request).code(), absl::StatusCode::kPermissionDenied);
  StillWorks();
}

TEST_F(Hostile, HandlesOfAnyLengthThatAreNoneAreRefused) {
  for (const std::size_t length : {1u, 15u, 16u, 17u, 64u, 4096u}) {
    v1::ExchangeRequest request = Request();
    request.mutable_fill()->set_arena(std::string(length, 'x'));
    EXPECT_EQ(Call(request).code(), absl::StatusCode::kFailedPrecondition) << length;
  }
  StillWorks();
}

TEST_F(Hostile, AnArenaIsMadeOfSizesThatMakeSense) {
  v1::OpenArenaRequest open;
  *open.mutable_id() = Request().id();
  open.set_gpu(FakeGpuDriver::NameOf(0));
  const std::vector<std::array<std::int64_t, 3>> sizes = {
      {0, 1, 256},  {256, 0, 256},  {256, 17, 256}, {255, 1, 256},
      {-256, 1, 256}, {256, 1, 0}, {std::numeric_limits<std::int64_t>::max(), 1, 256},
      {std::int64_t{1} << 41, 2, 256}};
  for (const auto& [bytes, windows, pull] : sizes) {
    open.set_window_bytes(bytes);
    open.set_windows(windows);
    open.set_pull_bytes(pull);
    grpc::ClientContext context;
    v1::OpenArenaReply reply;
    EXPECT_EQ(FromGrpc(stub_->OpenArena(&context, open, &reply)).code(),
              absl::StatusCode::kInvalidArgument)
        << bytes << " " << windows << " " << pull;
  }
  open.set_gpu("GPU-of-somebody-else");
  grpc::ClientContext context;
  v1::OpenArenaReply reply;
  EXPECT_THAT(std::string(FromGrpc(stub_->OpenArena(&context, open, &reply)).message()),
              HasSubstr("the daemon has no GPU"));
}

}  // namespace
}  // namespace muond::conformance
