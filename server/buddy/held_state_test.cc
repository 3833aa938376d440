#include "server/buddy/held_state.h"

#include <numeric>
#include <string>

#include "gtest/gtest.h"
#include "proto/check.h"
#include "proto/crc32c.h"

namespace muond {
namespace {

class HeldStateTest : public testing::Test {
 protected:
  absl::StatusOr<v1::BuddyPutReply> Put(const v1::BuddyPutRequest& request) {
    return held.Put(request, held.life());
  }

  // A snapshot of two tensors; `parts`: how many messages it comes in.
  void PutSnapshot(std::int64_t version, char fill = 's') {
    v1::BuddyPutRequest request;
    request.set_snapshot(version);
    request.set_start(true);
    for (const std::int64_t elements : {2, 3}) AddTensor(request, elements).set_t(version);
    AddChunk(request, 0, 0, std::string(8, fill));
    EXPECT_EQ(Must(Put(request)).held(), before_);
    v1::BuddyPutRequest rest;
    rest.set_snapshot(version);
    AddChunk(rest, 1, 0, std::string(12, fill));
    before_ = version;
    EXPECT_EQ(Must(Put(rest)).held(), version);
  }

  static v1::BuddyTensor& AddTensor(v1::BuddyPutRequest& request, std::int64_t elements,
                                    v1::Dtype dtype = v1::DTYPE_F32) {
    v1::BuddyTensor& tensor = *request.add_tensors();
    tensor.set_elements(elements);
    tensor.set_dtype(dtype);
    return tensor;
  }

  static void AddChunk(v1::BuddyPutRequest& request, std::int64_t item, std::int64_t offset,
                       const std::string& data) {
    v1::BuddyChunk& chunk = *request.add_chunks();
    chunk.set_item(item);
    chunk.set_offset(offset);
    chunk.set_data(data);
    chunk.set_crc32c(Crc32c(data.data(), data.size()));
  }

  static v1::BuddyPutRequest Gradient(std::int64_t step, std::int64_t generation,
                                      std::int64_t number, std::int64_t state,
                                      const std::string& data) {
    v1::BuddyPutRequest request;
    request.mutable_attempt()->set_step(step);
    request.mutable_attempt()->set_generation(generation);
    request.mutable_attempt()->set_number(number);
    if (state >= 0) {
      AddChunk(request, 0, 0, data);
      v1::BuddyGradient& gradient = *request.mutable_chunks(0)->mutable_gradient();
      gradient.set_state(state);
      gradient.set_bytes(static_cast<std::int64_t>(data.size()));
      gradient.set_divisor(2);
    }
    return request;
  }
  bool Seal(std::int64_t step, std::int64_t generation, std::int64_t number,
            std::vector<std::int64_t> states) {
    v1::BuddyPutRequest request = Gradient(step, generation, number, -1, "");
    request.set_seal(true);
    for (const std::int64_t state : states) request.add_states(state);
    return Must(Put(request)).sealed();
  }
  // A step with one gradient, sealed and decided.
  void Step(std::int64_t step, std::int64_t generation, const std::string& data,
            bool applied = true) {
    Must(Put(Gradient(step, generation, 1, 0, data)));
    EXPECT_TRUE(Seal(step, generation, 1, {0}));
    Decide(step, generation, applied);
  }
  void Decide(std::int64_t step, std::int64_t generation, bool applied) {
    v1::BuddyStep record;
    record.set_step(step);
    record.set_generation(generation);
    record.set_applied(applied);
    record.set_clip_coefficient(.5);
    held.OnStep(record);
  }
  std::string Read(std::int64_t item) {
    v1::BuddyReadRequest request;
    request.set_item(item);
    request.set_bytes(1000);
    return Must(held.Read(request)).data();
  }
  template <typename T>
  static T Must(absl::StatusOr<T> value) {
    EXPECT_TRUE(value.ok()) << value.status();
    return *std::move(value);
  }

  std::int64_t counted = 0;
  HeldState held{[this](std::int64_t bytes) { counted += bytes; }};

 private:
  std::int64_t before_ = -1;
};

TEST_F(HeldStateTest, ASnapshotAndTheStepsSinceComeBack) {
  PutSnapshot(4);
  Step(4, 1, "four");
  Step(5, 1, "five", false);
  Step(6, 1, "six!");
  const auto index = Must(held.Index(7));
  EXPECT_EQ(index.snapshot(), 4);
  ASSERT_EQ(index.tensors_size(), 2);
  ASSERT_EQ(index.steps_size(), 3);
  EXPECT_FALSE(index.steps(1).applied());
  EXPECT_EQ(index.steps(1).gradients_size(), 0) << "what was skipped is not taken again";
  EXPECT_EQ(index.steps(2).gradients(0).divisor(), 2);
  EXPECT_EQ(Read(0), std::string(8, 's'));
  EXPECT_EQ(Read(1), std::string(12, 's'));
  EXPECT_EQ(Read(2), "four");
  EXPECT_EQ(Read(3), "six!");
  v1::BuddyReadRequest beyond;
  beyond.set_item(4);
  EXPECT_EQ(held.Read(beyond).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Must(held.Index(5)).steps_size(), 1) << "any version since the snapshot";
}

TEST_F(HeldStateTest, NothingIsMadeUpWhereSomethingIsMissing) {
  EXPECT_FALSE(held.Index(0).ok()) << "no snapshot";
  PutSnapshot(2);
  EXPECT_TRUE(held.Index(2).ok());
  EXPECT_FALSE(held.Index(1).ok()) << "before the snapshot";
  EXPECT_FALSE(held.Index(3).ok()) << "step 2 is not known";
  Must(Put(Gradient(2, 1, 1, 0, "half")));
  Decide(2, 1, true);
  EXPECT_FALSE(held.Index(3).ok()) << "its gradients were never sealed";
  EXPECT_FALSE(Seal(2, 1, 1, {0, 1})) << "one is missing";
  EXPECT_FALSE(held.Index(3).ok());
  EXPECT_TRUE(Seal(2, 1, 1, {0}));
  EXPECT_TRUE(held.Index(3).ok());
}

TEST_F(HeldStateTest, GradientsOfAnotherAttemptThanTheOneThatWasAppliedAreNotTaken) {
  PutSnapshot(0);
  Must(Put(Gradient(0, 1, 1, 0, "old!")));
  EXPECT_TRUE(Seal(0, 1, 1, {0}));
  // The generation was raised and the step begun again, with none of this owner's parameters.
  Decide(0, 2, true);
  EXPECT_FALSE(held.Index(1).ok());
  EXPECT_TRUE(Seal(0, 2, 2, {}));
  EXPECT_EQ(Must(held.Index(1)).steps(0).gradients_size(), 0);
  // What comes late from before changes nothing.
  Must(Put(Gradient(0, 1, 1, 0, "late")));
  EXPECT_EQ(Must(held.Index(1)).steps(0).gradients_size(), 0);
}

TEST_F(HeldStateTest, ANewSnapshotTakesThePlaceOfAllThatIsOlder) {
  PutSnapshot(0);
  for (std::int64_t step = 0; step < 4; ++step) Step(step, 1, "data");
  EXPECT_EQ(held.bytes(), 20 + 4 * 4);
  v1::BuddyPutRequest start;
  start.set_snapshot(3);
  start.set_start(true);
  AddTensor(start, 5);
  Must(Put(start));
  EXPECT_EQ(held.bytes(), 40 + 4 * 4) << "the old one counts until the new one is whole";
  EXPECT_EQ(Must(held.Index(4)).snapshot(), 0);
  v1::BuddyPutRequest rest;
  rest.set_snapshot(3);
  AddChunk(rest, 0, 0, std::string(20, 'n'));
  EXPECT_EQ(Must(Put(rest)).held(), 3);
  EXPECT_EQ(held.bytes(), 20 + 4);
  EXPECT_EQ(counted, held.bytes());
  EXPECT_EQ(Must(held.Index(4)).steps_size(), 1);
  held.Clear();
  EXPECT_EQ(counted, 0);
}

TEST_F(HeldStateTest, ChunksOfAnUnknownSnapshotAreToldAndBadOnesRefused) {
  v1::BuddyPutRequest unknown;
  unknown.set_snapshot(7);
  AddChunk(unknown, 0, 0, "data");
  EXPECT_TRUE(Must(Put(unknown)).unknown());
  v1::BuddyPutRequest start;
  start.set_snapshot(7);
  start.set_start(true);
  AddTensor(start, 2);
  Must(Put(start));
  const auto refused = [&](std::int64_t item, std::int64_t offset, const std::string& data) {
    v1::BuddyPutRequest request;
    request.set_snapshot(7);
    AddChunk(request, item, offset, data);
    return Put(request).status().code();
  };
  EXPECT_EQ(refused(1, 0, "data"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(0, 6, "data"), absl::StatusCode::kInvalidArgument) << "beyond the end";
  EXPECT_EQ(refused(0, -1, "data"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(0, 4, "data"), absl::StatusCode::kInvalidArgument) << "leaves a hole";
  v1::BuddyPutRequest damaged;
  damaged.set_snapshot(7);
  AddChunk(damaged, 0, 0, "data");
  damaged.mutable_chunks(0)->set_crc32c(1);
  EXPECT_EQ(Put(damaged).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(refused(0, 0, "data"), absl::StatusCode::kOk);
  EXPECT_EQ(refused(0, 0, "data"), absl::StatusCode::kOk) << "again";
}

// The lineage was checked before all was made anew: a snapshot of before would count as one of the
// new state's same version.
TEST_F(HeldStateTest, WhatWasCheckedBeforeAClearIsNotTakenAfterIt) {
  const std::int64_t life = held.life();
  v1::BuddyPutRequest start;
  start.set_snapshot(0);
  start.set_start(true);
  AddTensor(start, 1);
  AddChunk(start, 0, 0, "old!");
  held.Clear();
  EXPECT_EQ(held.Put(start, life).status().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(held.Index(0).ok());
  EXPECT_EQ(Must(held.Put(start, held.life())).held(), 0);
}

TEST_F(HeldStateTest, AMomentumInBf16TakesTwoBytesAnElement) {
  v1::BuddyPutRequest start;
  start.set_snapshot(0);
  start.set_start(true);
  AddTensor(start, 3);
  AddTensor(start, 3, v1::DTYPE_BF16);
  AddChunk(start, 0, 0, std::string(12, 'w'));
  AddChunk(start, 1, 0, std::string(6, 'm'));
  EXPECT_EQ(Must(Put(start)).held(), 0) << "it is whole";
  EXPECT_EQ(held.bytes(), 18);
  v1::BuddyPutRequest unknown;
  unknown.set_snapshot(1);
  unknown.set_start(true);
  AddTensor(unknown, 3, v1::DTYPE_UNSPECIFIED);
  EXPECT_EQ(Put(unknown).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(held.bytes(), 18);
}

TEST_F(HeldStateTest, SizesThatNothingHoldsAreRefused) {
  for (const std::int64_t elements : {std::int64_t{1} << 62, std::int64_t{-1}}) {
    v1::BuddyPutRequest start;
    start.set_snapshot(0);
    start.set_start(true);
    AddTensor(start, 2);
    AddTensor(start, elements);
    EXPECT_EQ(Put(start).status().code(), absl::StatusCode::kResourceExhausted) << elements;
    EXPECT_EQ(held.bytes(), 0);
    EXPECT_EQ(counted, 0);
  }
}

TEST_F(HeldStateTest, WhatARecoveryReadIsLetGoOfWithTheNextSnapshot) {
  PutSnapshot(0);
  const auto read = [&] {
    v1::BuddyReadRequest request;
    request.set_bytes(8);
    return held.Read(request);
  };
  EXPECT_TRUE(held.Index(0).ok());
  EXPECT_EQ(Must(read()).data(), "ssssssss");
  PutSnapshot(1);
  EXPECT_EQ(read().status().code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace muond
