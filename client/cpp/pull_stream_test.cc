// What a session makes of the chunks of a Pull: assembled in place, and nothing believed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "client/cpp/fake_service.h"
#include "client/cpp/session.h"
#include "proto/crc32c.h"

namespace muond::client {
namespace {

using ::testing::HasSubstr;
using Messages = std::vector<v1::PullReply>;

constexpr std::int64_t kRows = 30;
constexpr std::int64_t kCols = 40;

class PullTest : public testing::Test {
 protected:
  PullTest() {
    RunSpec spec;
    spec.name = "r";
    spec.groups.push_back({.name = "g"});
    spec.parameters.push_back({.name = "w", .shape = Dims{kRows, kCols}, .group = "g"});
    spec.parameters.push_back({.name = "b", .shape = Dims{7}, .group = "g"});
    const RankSlices slices = {{"w", {Box{{0, 0}, {10, kCols}}, Box{{10, 0}, {20, kCols}}}},
                               {"b", {WholeBox({7})}}};
    SessionOptions options;
    options.channel = server_.channel();
    options.chunk_bytes = 1024;
    auto session = Session::Open(spec, 0, slices, options);
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    std::iota(w_.begin(), w_.end(), 1.0f);
    std::iota(b_.begin(), b_.end(), -3.0f);
    const SliceSource sources[] = {{"w", 0, w_.data(), 400}, {"w", 1, w_.data() + 400, 800},
                                   {"b", 0, b_.data(), 7}};
    EXPECT_TRUE(*session_->Initialize(sources));
  }

  absl::Status Pull() {
    got_.assign(got_.size(), std::numeric_limits<float>::quiet_NaN());
    // The slices of one parameter in another order than they were registered in.
    const SliceSink sinks[] = {{"w", 1, got_.data() + 400, 800},
                               {"b", 0, got_.data() + 1200, 7},
                               {"w", 0, got_.data(), 400}};
    return session_->Pull(0, sinks);
  }

  // Pulls with each attempt's messages changed; the error's text.
  std::string PullTampered(std::function<void(Messages&)> tamper, int attempts) {
    server_.service.tamper = std::move(tamper);
    server_.service.calls["Pull"] = 0;
    const absl::Status status = Pull();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(server_.service.calls["Pull"], attempts) << status;
    return status.ToString();
  }

  FakeServer server_;
  std::unique_ptr<Session> session_;
  std::vector<float> w_ = std::vector<float>(1200), b_ = std::vector<float>(7);
  std::vector<float> got_ = std::vector<float>(1207);
};

TEST_F(PullTest, AssemblesChunksInPlace) {
  const absl::Status status = Pull();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(std::equal(w_.begin(), w_.end(), got_.begin()));
  EXPECT_TRUE(std::equal(b_.begin(), b_.end(), got_.begin() + 1200));
}

TEST_F(PullTest, ACorruptedChunkIsPulledAgain) {
  bool first = true;
  server_.service.tamper = [&first](Messages& messages) {
    if (first) (*messages[2].mutable_chunk()->mutable_data())[100] ^= 0x10;
    first = false;
  };
  const absl::Status status = Pull();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(server_.service.calls["Pull"], 2);
  EXPECT_TRUE(std::equal(w_.begin(), w_.end(), got_.begin()));
}

TEST_F(PullTest, CorruptionThatStaysIsDataLoss) {
  EXPECT_THAT(PullTampered(
                  [](Messages& messages) {
                    (*messages[2].mutable_chunk()->mutable_data())[100] ^= 0x10;
                  },
                  4),
              testing::AllOf(HasSubstr("DATA_LOSS"), HasSubstr("parameter \"w\""),
                             HasSubstr("crc32c")));
}

TEST_F(PullTest, HolesOverlapsAndTruncationAreDataLoss) {
  EXPECT_THAT(PullTampered([](Messages& messages) { messages.pop_back(); }, 4),
              HasSubstr("ended before element 0 of 7"));
  EXPECT_THAT(PullTampered([](Messages& messages) { messages.erase(messages.begin() + 1); }, 4),
              HasSubstr("elements from 256 on"));
  EXPECT_THAT(PullTampered([](Messages& messages) { messages.push_back(messages.back()); }, 4),
              HasSubstr("at most 0 elements from 7 on"));
  EXPECT_THAT(PullTampered([](Messages& messages) { messages.clear(); }, 4),
              HasSubstr("ended before element 0 of"));
}

TEST_F(PullTest, MoreThanTheSinkHoldsIsNeverWritten) {
  EXPECT_THAT(PullTampered(
                  [](Messages& messages) {
                    v1::Chunk& chunk = *messages.back().mutable_chunk();  // of "b"
                    chunk.set_data(std::string(8 * 4, 'x'));
                    chunk.set_crc32c(Crc32c(chunk.data().data(), chunk.data().size()));
                  },
                  4),
              HasSubstr("got 32 bytes at element 0"));
  EXPECT_TRUE(std::isnan(got_[1200]));
}

TEST_F(PullTest, PartsOfAnElementAndOtherTypesAreDataLoss) {
  EXPECT_THAT(PullTampered(
                  [](Messages& messages) {
                    messages[0].mutable_chunk()->mutable_data()->resize(1023);
                  },
                  4),
              HasSubstr("got 1023 bytes"));
  EXPECT_THAT(PullTampered(
                  [](Messages& messages) {
                    messages[0].mutable_chunk()->set_dtype(v1::DTYPE_BF16);
                  },
                  4),
              HasSubstr("expected elements of type DTYPE_F32, got DTYPE_BF16"));
}

TEST_F(PullTest, ChunksOfAnotherVersionOrNotAskedForAreNotRepeated) {
  EXPECT_THAT(PullTampered([](Messages& messages) { messages[3].set_version(1); }, 1),
              HasSubstr("pull of version 0: got a chunk of version 1"));
  EXPECT_THAT(
      PullTampered([](Messages& messages) { messages[0].mutable_chunk()->set_slice(2); }, 1),
      HasSubstr("slice 2 was not asked for"));
  EXPECT_THAT(
      PullTampered([](Messages& messages) { messages[0].mutable_chunk()->set_parameter("v"); }, 1),
      HasSubstr("parameter \"v\""));
}

TEST_F(PullTest, AStreamThatBreaksIsPulledAgain) {
  server_.service.failures["Pull"].push_back(
      {{grpc::StatusCode::UNAVAILABLE, "socket closed"}, {}, true});
  server_.service.failures["Pull"].push_back({{grpc::StatusCode::ABORTED, "taken over"}, {}});
  const absl::Status status = Pull();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(server_.service.calls["Pull"], 3);
  EXPECT_TRUE(std::equal(w_.begin(), w_.end(), got_.begin()));
}

TEST_F(PullTest, NothingWantedNothingSent) {
  EXPECT_TRUE(session_->Pull(0, {}).ok());
  EXPECT_EQ(server_.service.calls["Pull"], 0);
}

}  // namespace
}  // namespace muond::client
