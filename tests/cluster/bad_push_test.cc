// Slices that a trainer can't mean: a clear error, nothing lost, and the step goes on.
#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/codegen/client_unary_call.h"
#include "tests/cluster/bad_input.h"

namespace muond::cluster {
namespace {

using absl::StatusCode;

v1::Chunk Corrupt(v1::Chunk chunk) {
  chunk.set_crc32c(chunk.crc32c() ^ 1);
  return chunk;
}

v1::Chunk InMicroBatch(v1::Chunk chunk, std::int64_t micro_batch) {
  chunk.set_micro_batch(micro_batch);
  return chunk;
}

const std::vector<Case> kPushCases = {
    {"PushTooManyBytes",
     StatusCode::kInvalidArgument,
     {"parameter \"p\": push for step 1", "expected 12 bytes, got at least 16"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, 0, Bytes({1, 2, 3, 4}))});
     }},
    {"PushTruncated",
     StatusCode::kInvalidArgument,
     {"parameter \"p\": push for step 1", "expected 12 bytes, got 8"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, 0, Bytes({1, 2}))});
     }},
    {"PushGap",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "expected a chunk at element 0, got 1"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, 1, Bytes({1, 2}))});
     }},
    {"PushUnsorted",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "expected a chunk at element 1, got 2"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, 0, Bytes({1})), ChunkOf("p", 0, 2, Bytes({3}))});
     }},
    {"PushOverlap",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "expected a chunk at element 2, got 1"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, 0, Bytes({1, 2})), ChunkOf("p", 0, 1, Bytes({2, 3}))});
     }},
    {"PushNegativeOffset",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "got -3"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, -3, Bytes({1, 2, 3}))});
     }},
    {"PushTornElement",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "whole elements of 4 bytes, got 5 bytes"},
     [](Bench& bench) { return bench.Push({ChunkOf("p", 0, 0, "abcde")}); }},
    {"PushCorrupted",
     StatusCode::kDataLoss,
     {"parameter \"w\": push for step 1 of slice 1 from rank 0", "crc32c"},
     [](Bench& bench) { return bench.Push({Corrupt(bench.Good("w", 1))}); }},
    {"PushUnknownName",
     StatusCode::kNotFound,
     {"parameter \"w_typo\""},
     [](Bench& bench) { return bench.Push({ChunkOf("w_typo", 0, 0, Bytes({1}))}); }},
    {"PushNoName",
     StatusCode::kNotFound,
     {"parameter \"\""},
     [](Bench& bench) {
       return bench.Push({bench.Good("p", 0), v1::Chunk()});
     }},
    {"PushSliceTooHigh",
     StatusCode::kNotFound,
     {"parameter \"p\"", "registered 2 slices, there is no slice 2"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 2, 0, Bytes({1, 2, 3}))});
     }},
    {"PushSliceNegative",
     StatusCode::kNotFound,
     {"parameter \"p\"", "no slice -1"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", -1, 0, Bytes({1, 2, 3}))});
     }},
    {"PushMicroBatchTooHigh",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "no micro-batch 1"},
     [](Bench& bench) { return bench.Push({InMicroBatch(bench.Good("p", 0), 1)}); }},
    {"PushMicroBatchNegative",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "no micro-batch -1"},
     [](Bench& bench) { return bench.Push({InMicroBatch(bench.Good("p", 0), -1)}); }},
    {"PushUnknownDtype",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "dtype"},
     [](Bench& bench) {
       return bench.Push({ChunkOf("p", 0, 0, Bytes({1, 2, 3}), static_cast<v1::Dtype>(7))});
     }},
    {"PushDtypeChangesWithinASlice",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "expected elements of f32, got bf16"},
     [](Bench& bench) {
       return bench.Push(
           {ChunkOf("p", 0, 0, Bytes({1})), ChunkOf("p", 0, 1, "abcd", v1::DTYPE_BF16)});
     }},
    {"PushDtypeChangesBetweenSlices",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "differ in dtype"},
     [](Bench& bench) {
       return bench.Push({bench.Good("p", 0), ChunkOf("p", 1, 0, "abcdef", v1::DTYPE_BF16)});
     }},
    {"PushOfAnotherDtypeTruncated",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "expected 6 bytes, got 4"},
     [](Bench& bench) { return bench.Push({ChunkOf("p", 0, 0, "abcd", v1::DTYPE_F16)}); }},
    {"PushOtherBytes",
     StatusCode::kAlreadyExists,
     {"parameter \"p\": push for step 1", "slice 0 of rank 0"},
     [](Bench& bench) {
       Must(bench.Push({bench.Good("p", 0)}));
       return bench.Push({ChunkOf("p", 0, 0, Bytes({7, 8, 9}))});
     }},
    {"PushBeforeBegin",
     StatusCode::kFailedPrecondition,
     {"step 1: push by rank 0", "has not begun"},
     [](Bench& bench) { return bench.trainer.Push(1, {bench.Good("p", 0)}).status(); }},
    {"PushAhead",
     StatusCode::kFailedPrecondition,
     {"step 9: push by rank 0", "expected step 1 of generation 1"},
     [](Bench& bench) { return bench.trainer.Push(9, {bench.Good("p", 0)}).status(); }},
    {"PushMessageBeyondTheLimit",
     StatusCode::kResourceExhausted,
     {"parameter \"p\"", "5242880 bytes", "--max-chunk-bytes"},
     [](Bench& bench) { return bench.Push({ChunkOf("p", 0, 0, std::string(5 << 20, 'x'))}); }},
    {"PushVeryLongName",
     StatusCode::kNotFound,
     {"parameter \"xxxxxxxx"},
     [](Bench& bench) { return bench.Push({ChunkOf(std::string(20000, 'x'), 0, 0, "")}); }},
};

class BadPush : public ::testing::TestWithParam<Case> {};

TEST_P(BadPush, IsAClearErrorAndChangesNothing) { ExpectHarmless(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Cases, BadPush, ::testing::ValuesIn(kPushCases), CaseName);

// Bytes that are no messages of ours: nothing may crash, hang or change.
TEST(Garbage, HarmsNobody) {
  Bench bench;
  const v1::DigestReply before = bench.run.Digest();
  const auto channel = bench.service->channel();
  std::mt19937_64 random(7);
  for (const char* verb : {"Register", "Initialize", "Begin", "Push", "Finish", "Skip", "Pull",
                           "Close", "Status", "DescribeParameters", "Digest", "NoSuchVerb"}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::string bytes(random() % 200, '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      const grpc::Slice slice(bytes);
      const grpc::ByteBuffer request(&slice, 1);
      grpc::ByteBuffer reply;
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
      const std::string path = std::string("/muond.v1.Optimizer/") + verb;
      const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
      const grpc::Status status =
          grpc::internal::BlockingUnaryCall(channel.get(), method, &context, request, &reply);
      EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << verb;
    }
  }
  EXPECT_EQ(bench.run.Digest().SerializeAsString(), before.SerializeAsString());
  EXPECT_TRUE(bench.run.Step(bench.good).applied);
}

}  // namespace
}  // namespace muond::cluster
