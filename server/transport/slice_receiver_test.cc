#include "server/transport/slice_receiver.h"

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "proto/crc32c.h"

namespace muond {
namespace {

class SliceReceiverTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 6, kCols = 5;

  SliceReceiverTest() : tensor_(kRows * kCols, -1.0f), slice_(3 * 2) {
    std::iota(slice_.begin(), slice_.end(), 10.0f);
  }

  std::unique_ptr<SliceReceiver> Make(Box box, bool write = true) {
    SliceTarget target{.base = write ? reinterpret_cast<std::byte*>(tensor_.data()) : nullptr,
                       .shape = {kRows, kCols}};
    return std::make_unique<SliceReceiver>("parameter \"w\": push for step 7", std::move(box),
                                           Dtype::kF32, target);
  }

  // Sends elements [first, first + count) of the slice.
  absl::Status Send(SliceReceiver& receiver, std::int64_t first, std::int64_t count) {
    absl::string_view payload(reinterpret_cast<const char*>(slice_.data() + first), count * 4);
    return receiver.Receive({first, Dtype::kF32, Crc32c(payload.data(), payload.size())}, payload);
  }

  std::vector<float> tensor_;
  std::vector<float> slice_;
  const Box box_{{1, 2}, {3, 2}};
};

TEST_F(SliceReceiverTest, ABlockLandsInItsRowsAndColumnsOnly) {
  auto receiver = Make(box_);
  ASSERT_TRUE(Send(*receiver, 0, 6).ok());
  EXPECT_TRUE(receiver->complete());
  int next = 10;
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      const bool inside = row >= 1 && row < 4 && col >= 2 && col < 4;
      EXPECT_EQ(tensor_[row * kCols + col], inside ? next++ : -1) << row << "," << col;
    }
  }
}

TEST_F(SliceReceiverTest, DigestAndContentsDoNotDependOnTheChunking) {
  auto whole = Make(box_);
  ASSERT_TRUE(Send(*whole, 0, 6).ok());
  const auto expected = tensor_;
  for (int cut = 1; cut < 6; ++cut) {
    tensor_.assign(tensor_.size(), -1.0f);
    auto pieces = Make(box_);
    ASSERT_TRUE(Send(*pieces, 0, cut).ok());
    EXPECT_FALSE(pieces->complete());
    ASSERT_TRUE(Send(*pieces, cut, 6 - cut).ok());
    EXPECT_EQ(pieces->digest(), whole->digest());
    EXPECT_EQ(tensor_, expected);
  }
}

TEST_F(SliceReceiverTest, OfASliceOnlyTheElementsOfTheShardsAreExpected) {
  // Elements [0, 6), [13, 30) of 6 x 5 live here, one behind the other. Of the slice, rows 1 to 3
  // and columns 2 to 3: row 1 is elsewhere, row 2 has element 13, row 3 has both.
  SliceTarget target{.base = reinterpret_cast<std::byte*>(tensor_.data()), .shape = {kRows, kCols}};
  target.shards = {{0, 0, 6, 0}, {0, 13, 17, 0}};
  SliceReceiver receiver("parameter \"w\": push for step 7", box_, Dtype::kF32, target);
  EXPECT_EQ(receiver.elements(), 3);
  EXPECT_EQ(Send(receiver, 0, 1).message(),
            "parameter \"w\": push for step 7: expected a chunk at element 3, got 0");
  ASSERT_TRUE(Send(receiver, 3, 1).ok());
  ASSERT_TRUE(Send(receiver, 4, 2).ok());
  EXPECT_TRUE(receiver.complete());
  std::vector<float> expected(tensor_.size(), -1.0f);
  expected[6 + 13 - 13] = 13;
  expected[6 + 17 - 13] = 14;
  expected[6 + 18 - 13] = 15;
  EXPECT_EQ(tensor_, expected);
}

TEST_F(SliceReceiverTest, AChunkThatReachesIntoAnotherDaemonsElementsIsRefused) {
  SliceTarget target{.base = reinterpret_cast<std::byte*>(tensor_.data()), .shape = {kRows, kCols}};
  target.shards = {{0, 0, 8, 0}, {0, 17, 13, 0}};  // of the slice: element 0, then 4 and 5
  SliceReceiver receiver("parameter \"w\": push for step 7", box_, Dtype::kF32, target);
  EXPECT_EQ(Send(receiver, 0, 3).message(),
            "parameter \"w\": push for step 7: chunk at element 0: expected at most 1 elements, "
            "the next belong to another daemon; got 3");
  EXPECT_EQ(receiver.received(), 0);
  ASSERT_TRUE(Send(receiver, 0, 1).ok());
  ASSERT_TRUE(Send(receiver, 4, 2).ok());
  EXPECT_TRUE(receiver.complete());
}

TEST_F(SliceReceiverTest, OtherBytesHaveAnotherDigest) {
  auto one = Make(box_, false), two = Make(box_, false);
  ASSERT_TRUE(Send(*one, 0, 6).ok());
  slice_[5] = 99;
  ASSERT_TRUE(Send(*two, 0, 6).ok());
  EXPECT_NE(one->digest(), two->digest());
}

TEST_F(SliceReceiverTest, VerifyingWritesNothing) {
  auto receiver = Make(box_, false);
  ASSERT_TRUE(Send(*receiver, 0, 6).ok());
  EXPECT_EQ(tensor_, std::vector<float>(kRows * kCols, -1.0f));
}

TEST_F(SliceReceiverTest, HolesAndStepsBackAreRefused) {
  auto receiver = Make(box_);
  EXPECT_EQ(Send(*receiver, 1, 2).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Send(*receiver, 0, 2).ok());
  const absl::Status again = Send(*receiver, 0, 2);
  EXPECT_EQ(again.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(again.message()),
            "parameter \"w\": push for step 7: expected a chunk at element 2, got 0");
}

TEST_F(SliceReceiverTest, TooManyAndTooFewBytesAreNamed) {
  slice_.resize(8);
  auto receiver = Make(box_);
  const absl::Status many = Send(*receiver, 0, 7);
  EXPECT_EQ(std::string(many.message()),
            "parameter \"w\": push for step 7: expected 24 bytes, got at least 28");
  EXPECT_EQ(tensor_, std::vector<float>(kRows * kCols, -1.0f));
  ASSERT_TRUE(Send(*receiver, 0, 5).ok());
  EXPECT_EQ(std::string(receiver->CheckComplete().message()),
            "parameter \"w\": push for step 7: expected 24 bytes, got 20");
}

TEST_F(SliceReceiverTest, ATornElementIsRefused) {
  auto receiver = Make(box_);
  const absl::string_view payload("abcdef", 6);
  EXPECT_EQ(receiver->Receive({0, Dtype::kF32, Crc32c("abcdef", 6)}, payload).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SliceReceiverTest, ACorruptedChunkIsDataLossAndCountsForNothing) {
  auto receiver = Make(box_), other = Make(box_);
  const absl::string_view payload(reinterpret_cast<const char*>(slice_.data()), 24);
  const std::uint32_t wrong = Crc32c(payload.data(), payload.size()) ^ 1;
  EXPECT_EQ(receiver->Receive({0, Dtype::kF32, wrong}, payload).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(receiver->received(), 0);
  // Nothing outside of the slice was touched, and its elements come right with the next chunk.
  for (int i = 0; i < kRows * kCols; ++i) {
    const int row = i / kCols, col = i % kCols;
    if (row >= 1 && row <= 3 && col >= 2 && col <= 3) continue;
    EXPECT_EQ(tensor_[i], -1) << i;
  }
  ASSERT_TRUE(Send(*receiver, 0, 6).ok());
  EXPECT_EQ(tensor_[1 * kCols + 2], 10);
  EXPECT_EQ(tensor_[3 * kCols + 3], 15);
  ASSERT_TRUE(Send(*other, 0, 6).ok());
  EXPECT_EQ(receiver->digest(), other->digest());
}

// A trainer that writes to its arena while the daemon reads it is either caught or harmless.
TEST_F(SliceReceiverTest, WhatChangesWhileItIsReadIsCaughtOrWasNotPlaced) {
  constexpr std::int64_t kElements = 64 << 10;
  std::vector<float> shared(kElements, 1.0f), place(kElements);
  const std::uint32_t crc = Crc32c(shared.data(), kElements * 4);
  std::atomic<bool> stop{false};
  std::thread trainer([&] {
    auto* const last = reinterpret_cast<volatile float*>(&shared.back());
    for (int i = 0; !stop; ++i) *last = i % 64 == 0 ? 2.0f : 1.0f;
  });
  const absl::string_view payload(reinterpret_cast<const char*>(shared.data()), kElements * 4);
  int caught = 0;
  for (int i = 0; i < 300; ++i) {
    SliceReceiver receiver("w", {{0}, {kElements}}, Dtype::kF32,
                           {.keepalive = nullptr,
                            .base = reinterpret_cast<std::byte*>(place.data()),
                            .shape = {kElements},
                            .shards = {}});
    const absl::Status status = receiver.Receive({0, Dtype::kF32, crc}, payload);
    if (status.ok()) {
      EXPECT_EQ(place.back(), 1.0f);
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      ++caught;
    }
  }
  stop = true;
  trainer.join();
  RecordProperty("caught", caught);
}

TEST_F(SliceReceiverTest, AnotherDtypeIsRefusedByName) {
  auto receiver = Make(box_);
  const absl::Status status = receiver->Receive({0, Dtype::kF16, 0}, absl::string_view());
  EXPECT_EQ(std::string(status.message()),
            "parameter \"w\": push for step 7: expected elements of f32, got f16");
}

TEST_F(SliceReceiverTest, AReplacedStreamCannotWrite) {
  auto receiver = Make(box_);
  ASSERT_TRUE(Send(*receiver, 0, 2).ok());
  receiver->Revoke(absl::AbortedError("a newer stream sends this slice again"));
  EXPECT_EQ(Send(*receiver, 2, 2).code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace muond
