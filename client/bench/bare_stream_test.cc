#include "client/bench/bare_stream.h"

#include <cstdio>

#include "absl/strings/str_format.h"
#include "client/cpp/connection.h"
#include "grpcpp/channel.h"
#include "gtest/gtest.h"
#include "proto/channel.h"

namespace muond::bench {
namespace {

constexpr std::int64_t kChunk = 64 << 10;
constexpr std::int64_t kTotal = 4 << 20;

void ExpectPlausible(const absl::StatusOr<BareStreamRates>& rates) {
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_GT(rates->push, 1e6);
  EXPECT_GT(rates->pull, 1e6);
}

TEST(BareStream, RunsThroughASocket) {
  const auto server = BareStreamServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  const auto channel =
      MakeChannel(absl::StrFormat("127.0.0.1:%d", (*server)->port()), 2 * kChunk);
  ExpectPlausible(MeasureBareStream(channel, kChunk, kTotal));
}

TEST(BareStream, SaysWhatWentWrong) {
  EXPECT_EQ(BareStreamServer::Start("unix:/no/such/folder/s.sock").status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(MeasureBareStreamOfProcess("/no/such/program", kChunk, kTotal).status().code(),
            absl::StatusCode::kUnavailable);
  const auto nobody = MakeChannel("unix:/no/such/socket", 2 * kChunk);
  EXPECT_EQ(MeasureBareStream(nobody, kChunk, kTotal).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace muond::bench
