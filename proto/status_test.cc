#include "proto/status.h"

#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "muond/v1/optimizer.grpc.pb.h"

namespace muond {
namespace {

TEST(Status, EveryCodeAndItsMessageSurviveTheWire) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "parameter \"w\": what, why");
    const grpc::Status wire = ToGrpc(status);
    EXPECT_EQ(static_cast<int>(wire.error_code()), code);
    EXPECT_EQ(FromGrpc(wire), status) << code;
  }
}

TEST(Status, NamesMeanTheSame) {
  EXPECT_EQ(ToGrpc(absl::InvalidArgumentError("x")).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ToGrpc(absl::FailedPreconditionError("x")).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(absl::IsDataLoss(FromGrpc(grpc::Status(grpc::StatusCode::DATA_LOSS, "x"))));
}

// gRPC turns trailing metadata beyond 8 KiB into an error of its own: the real code would be lost.
TEST(Status, LongMessagesAreCutSoThatTheCodeArrives) {
  const absl::Status status = absl::NotFoundError(std::string(100'000, 'x'));
  const grpc::Status wire = ToGrpc(status);
  EXPECT_EQ(wire.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(wire.error_message().size(), kStatusMessageBytesMax);
  EXPECT_EQ(wire.error_message().substr(kStatusMessageBytesMax - 4), "x...");
}

TEST(Status, NoPositionWhereNoneCame) {
  const grpc::ClientContext context;
  EXPECT_FALSE(PositionFrom(context).has_value());
}

// Refuses every Close with the position that it is given.
class RefusingService : public v1::Optimizer::Service {
 public:
  explicit RefusingService(v1::RunPosition position) : position_(std::move(position)) {}

  grpc::Status Close(grpc::ServerContext* context, const v1::CloseRequest*,
                     v1::CloseReply*) override {
    AttachPosition(position_, context);
    return ToGrpc(absl::FailedPreconditionError("step 7: expected step 8"));
  }

 private:
  v1::RunPosition position_;
};

TEST(Status, RefusalsCarryThePosition) {
  v1::RunPosition position;
  position.set_generation(3);
  position.set_next_step(8);
  position.mutable_last_outcome()->set_step(7);
  position.mutable_last_outcome()->set_grad_norm(0.1);  // its bytes are no text
  RefusingService service(position);
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  const auto stub = v1::Optimizer::NewStub(server->InProcessChannel({}));
  grpc::ClientContext context;
  v1::CloseReply reply;
  const absl::Status status = FromGrpc(stub->Close(&context, {}, &reply));
  EXPECT_EQ(status, absl::FailedPreconditionError("step 7: expected step 8"));
  const auto received = PositionFrom(context);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->SerializeAsString(), position.SerializeAsString());
}

}  // namespace
}  // namespace muond
