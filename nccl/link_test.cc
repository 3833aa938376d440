// A pair of links over the fake: bytes arrive, whatever fails ends within its deadline, and NCCL's
// rules are kept on the way.
#include "absl/time/time.h"
#include "nccl/link.h"

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nccl/fake.h"
#include "nccl/transfer_plan.h"
#include "proto/steady_time.h"

namespace muond::nccl {
namespace {

constexpr char kDaemonGpu[] = "GPU-d", kTrainerGpu[] = "GPU-t";

class DoneSlot {
 public:
  Done callback() {
    return [promise = promise_](const absl::Status& status) { promise->set_value(status); };
  }
  absl::Status Wait() {
    if (future_.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      return absl::InternalError("the test waited for nothing");
    }
    return future_.get();
  }

 private:
  std::shared_ptr<std::promise<absl::Status>> promise_ =
      std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> future_ = promise_->get_future();
};

// Device memory that ends with the test.
class Memory {
 public:
  Memory(Device& device, std::string text) : device_(device), size_(text.size()) {
    data_ = *device.Allocate(size_);
    std::memcpy(data_, text.data(), size_);
  }
  ~Memory() { device_.Free(data_); }
  Piece piece() const { return {data_, size_}; }
  std::string text() const { return {static_cast<const char*>(data_), size_}; }

 private:
  Device& device_;
  const std::size_t size_;
  void* data_ = nullptr;
};

class LinkTest : public testing::Test {
 protected:
  LinkTest() {
    fake::Reset();
    Start(kDaemonGpu, kTrainerGpu);
  }
  ~LinkTest() override {
    fake::SetFaults({});
    a_.reset();
    b_.reset();
    daemon_.reset();
    trainer_.reset();
    EXPECT_THAT(fake::Violations(), testing::IsEmpty());
    const fake::Counts left = fake::Count();
    EXPECT_EQ(left.open_communicators, 0);
    EXPECT_EQ(left.open_streams, 0);
    EXPECT_EQ(left.open_events, 0);
    EXPECT_EQ(left.device_bytes, 0);
  }

  void Start(const std::string& daemon, const std::string& trainer) {
    daemon_ = std::make_unique<Worker>(fake::TheLibrary().api, fake::MakeDevice(daemon));
    trainer_ = std::make_unique<Worker>(fake::TheLibrary().api, fake::MakeDevice(trainer));
  }
  // What the two ends hear.
  std::pair<absl::Status, absl::Status> Connect(absl::Duration within = absl::Seconds(10)) {
    UniqueId id;
    fake::TheLibrary().api.get_unique_id(&id);
    DoneSlot a, b;
    a_ = daemon_->Connect(id, 0, SteadyNow() + within, a.callback());
    b_ = trainer_->Connect(id, 1, SteadyNow() + within, b.callback());
    const absl::Status first = a.Wait();
    return {first, b.Wait()};
  }
  static Exchange Sends(std::vector<Piece> pieces, DoneSlot& done,
                        absl::Duration within = absl::Seconds(10)) {
    Exchange exchange;
    exchange.sends = std::move(pieces);
    exchange.deadline = SteadyNow() + within;
    exchange.done = done.callback();
    return exchange;
  }
  static Exchange Receives(std::vector<Piece> pieces, DoneSlot& done,
                           absl::Duration within = absl::Seconds(10)) {
    Exchange exchange = Sends({}, done, within);
    exchange.receives = std::move(pieces);
    return exchange;
  }

  std::unique_ptr<Worker> daemon_, trainer_;
  std::shared_ptr<Link> a_, b_;
};

TEST_F(LinkTest, BytesArriveInOrder) {
  const auto [daemon, trainer] = Connect();
  ASSERT_TRUE(daemon.ok()) << daemon;
  ASSERT_TRUE(trainer.ok()) << trainer;
  Memory one(trainer_->device(), "one"), three(trainer_->device(), "three");
  Memory to_one(daemon_->device(), "..."), to_three(daemon_->device(), ".....");
  Memory back(daemon_->device(), "back"), to_back(trainer_->device(), "....");
  std::vector<DoneSlot> done(4);
  ASSERT_TRUE(b_->Post(Sends({one.piece(), {nullptr, 0}, three.piece()}, done[0])).ok());
  ASSERT_TRUE(b_->Post(Receives({to_back.piece()}, done[1])).ok());
  ASSERT_TRUE(a_->Post(Receives({to_one.piece(), {nullptr, 0}, to_three.piece()}, done[2])).ok());
  ASSERT_TRUE(a_->Post(Sends({back.piece()}, done[3])).ok());
  for (DoneSlot& slot : done) EXPECT_TRUE(slot.Wait().ok());
  EXPECT_EQ(to_one.text(), "one");
  EXPECT_EQ(to_three.text(), "three");
  EXPECT_EQ(to_back.text(), "back");
}

TEST_F(LinkTest, ExchangesMayBePostedBeforeThePeerIsThere) {
  UniqueId id;
  fake::TheLibrary().api.get_unique_id(&id);
  DoneSlot ready_a, ready_b, sent, received;
  Memory from(trainer_->device(), "early"), to(daemon_->device(), ".....");
  b_ = trainer_->Connect(id, 1, SteadyNow() + absl::Seconds(10), ready_b.callback());
  ASSERT_TRUE(b_->Post(Sends({from.piece()}, sent)).ok());
  a_ = daemon_->Connect(id, 0, SteadyNow() + absl::Seconds(10), ready_a.callback());
  ASSERT_TRUE(a_->Post(Receives({to.piece()}, received)).ok());
  EXPECT_TRUE(ready_a.Wait().ok());
  EXPECT_TRUE(ready_b.Wait().ok());
  EXPECT_TRUE(sent.Wait().ok());
  EXPECT_TRUE(received.Wait().ok());
  EXPECT_EQ(to.text(), "early");
}

TEST_F(LinkTest, SmallPiecesTravelInAPack) {
  ASSERT_TRUE(Connect().first.ok());
  Memory a(trainer_->device(), "aa"), b(trainer_->device(), "bbb"),
      pack(trainer_->device(), "......"), to(daemon_->device(), "......");
  DoneSlot sent, received;
  Exchange exchange = Sends({pack.piece()}, sent);
  exchange.copies = {{pack.piece().data, a.piece().data, 2},
                     {static_cast<char*>(pack.piece().data) + 3, b.piece().data, 3}};
  ASSERT_TRUE(b_->Post(std::move(exchange)).ok());
  ASSERT_TRUE(a_->Post(Receives({to.piece()}, received)).ok());
  EXPECT_TRUE(received.Wait().ok());
  EXPECT_TRUE(sent.Wait().ok());
  EXPECT_EQ(to.text(), "aa.bbb");
}

TEST_F(LinkTest, APeerThatNeverComesIsGivenUpInTime) {
  UniqueId id;
  fake::TheLibrary().api.get_unique_id(&id);
  DoneSlot ready;
  a_ = daemon_->Connect(id, 0, SteadyNow() + absl::Milliseconds(50), ready.callback());
  EXPECT_TRUE(absl::IsDeadlineExceeded(ready.Wait()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(a_->status()));
}

TEST_F(LinkTest, TwoRanksOnOneGpuAreRefused) {
  Start("GPU-same", "GPU-same");
  const auto [daemon, trainer] = Connect();
  EXPECT_TRUE(absl::IsFailedPrecondition(daemon)) << daemon;
  EXPECT_THAT(std::string(trainer.message()), testing::HasSubstr("Duplicate GPU detected"));
}

TEST_F(LinkTest, APeerKilledInAnExchangeCostsItsDeadlineAndNoOtherLink) {
  ASSERT_TRUE(Connect().first.ok());
  auto other_gpu = std::make_unique<Worker>(fake::TheLibrary().api, fake::MakeDevice("GPU-o"));
  UniqueId id;
  fake::TheLibrary().api.get_unique_id(&id);
  DoneSlot ready_c, ready_d, killed, sent, received;
  auto c = daemon_->Connect(id, 0, SteadyNow() + absl::Seconds(10), ready_c.callback());
  auto d = other_gpu->Connect(id, 1, SteadyNow() + absl::Seconds(10), ready_d.callback());
  ASSERT_TRUE(ready_c.Wait().ok());
  ASSERT_TRUE(ready_d.Wait().ok());
  fake::SetFaults({.silent = kTrainerGpu});
  Memory lost(daemon_->device(), "...."), from(other_gpu->device(), "live"),
      to(daemon_->device(), "....");
  const absl::Time start = SteadyNow();
  ASSERT_TRUE(a_->Post(Receives({lost.piece()}, killed, absl::Milliseconds(300))).ok());
  ASSERT_TRUE(c->Post(Receives({to.piece()}, received)).ok());
  ASSERT_TRUE(d->Post(Sends({from.piece()}, sent)).ok());
  EXPECT_TRUE(received.Wait().ok());  // while the other link still waits
  EXPECT_EQ(to.text(), "live");
  EXPECT_TRUE(sent.Wait().ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(killed.Wait()));
  EXPECT_LT(SteadyNow() - start, absl::Seconds(15));
  // The device is fine: a new pair works.
  fake::SetFaults({});
  const auto [again, too] = Connect();
  EXPECT_TRUE(again.ok()) << again;
  EXPECT_TRUE(too.ok()) << too;
  c.reset();
  d.reset();
}

TEST_F(LinkTest, AnErrorThatNcclReportsBreaksTheLinkAtOnce) {
  ASSERT_TRUE(Connect().first.ok());
  Memory to(daemon_->device(), "....");
  DoneSlot received;
  ASSERT_TRUE(a_->Post(Receives({to.piece()}, received)).ok());
  fake::SetFaults({.remote_error = true});
  const absl::Status status = received.Wait();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("ncclRemoteError"));
}

TEST_F(LinkTest, AnAbortThatBlocksLeavesTheThreadFree) {
  ASSERT_TRUE(Connect().first.ok());
  fake::SetFaults({.stuck_abort = true});
  Memory lost(daemon_->device(), "....");
  DoneSlot ended;
  ASSERT_TRUE(a_->Post(Receives({lost.piece()}, ended)).ok());
  a_->Abort(absl::CancelledError("the trainer is gone"));
  UniqueId id;
  fake::TheLibrary().api.get_unique_id(&id);
  DoneSlot ready_c, ready_d;
  auto c = daemon_->Connect(id, 0, SteadyNow() + absl::Seconds(10), ready_c.callback());
  auto d = trainer_->Connect(id, 1, SteadyNow() + absl::Seconds(10), ready_d.callback());
  EXPECT_TRUE(ready_c.Wait().ok());
  EXPECT_TRUE(ready_d.Wait().ok());
  EXPECT_TRUE(absl::IsCancelled(a_->status()));
  // The memory is NCCL's until the abort is through: nobody was told that the exchange has ended.
  EXPECT_EQ(fake::Count().aborts, 0);
  fake::SetFaults({});
  EXPECT_TRUE(absl::IsCancelled(ended.Wait()));
}

TEST_F(LinkTest, ABrokenLinkRefusesWithItsReason) {
  ASSERT_TRUE(Connect().first.ok());
  a_->Abort(absl::CancelledError("enough"));
  Memory to(daemon_->device(), "....");
  DoneSlot never;
  const absl::Status refused = a_->Post(Receives({to.piece()}, never));
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("enough"));
}

TEST(TransferPlan, SmallRegionsShareATransferAndEmptyOnesHaveNone) {
  constexpr std::int64_t kBig = kAloneBytes;
  const std::vector<Region> regions = {{0, 100}, {128, 0},        {128, 28},
                                       {256, kBig}, {256 + kBig, 5}, {512 + kBig, 6}};
  const std::vector<Transfer> plan = PlanTransfers(regions);
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].offset, 0);
  EXPECT_EQ(plan[0].bytes, 156);
  EXPECT_EQ(plan[0].first, 0u);
  EXPECT_EQ(plan[0].count, 3u);
  EXPECT_EQ(plan[1].offset, 256);
  EXPECT_EQ(plan[1].bytes, kBig);
  EXPECT_EQ(plan[2].offset, 256 + kBig);
  EXPECT_EQ(plan[2].bytes, 512 + 6 - 256);
  EXPECT_EQ(plan[2].count, 2u);
  EXPECT_TRUE(PlanTransfers({}).empty());
  const Region nothing{64, 0};
  EXPECT_TRUE(PlanTransfers({&nothing, 1}).empty());
}

}  // namespace
}  // namespace muond::nccl
