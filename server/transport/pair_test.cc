// The daemon's end of a pair, with a trainer's end that is a bare link over the fake.
#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nccl/fake.h"
#include "nccl/warm_up.h"
#include "proto/steady_time.h"
#include "server/transport/pair_table.h"

namespace muond {
namespace {

using testing::HasSubstr;

constexpr char kDaemonGpu[] = "GPU-d", kTrainerGpu[] = "GPU-t";
constexpr int kVersion = 22809;
const ArenaOwner kOwner{"r", 3};
const PairSize kSize{.window_bytes = 4096, .windows = 2, .pull_bytes = 2048};

std::string Text(const absl::Status& status) { return std::string(status.message()); }

class Heard {
 public:
  std::function<void(const absl::Status&)> callback() {
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

class PairTest : public testing::Test {
 protected:
  PairTest()
      : trainer_(nccl::fake::TheLibrary().api, nccl::fake::MakeDevice(kTrainerGpu)),
        memory_(static_cast<char*>(*trainer_.device().Allocate(16384))) {
    nccl::fake::Reset();
  }
  ~PairTest() override {
    nccl::fake::SetFaults({});
    link_.reset();
    trainer_.device().Free(memory_);
    EXPECT_THAT(nccl::fake::Violations(), testing::IsEmpty());
  }

  static NcclPlatform Platform() {
    return {&nccl::fake::TheLibrary(), nccl::fake::MakeDevice(kDaemonGpu)};
  }

  // Both ends; what the daemon hears of it.
  absl::Status Connect(absl::Duration within = absl::Seconds(10)) {
    nccl::UniqueId id;
    auto opened = table_.Open(kOwner, {kVersion, kTrainerGpu}, kSize, &id);
    if (!opened.ok()) return opened.status();
    pair_ = *std::move(opened);
    Heard daemon, trainer;
    pair_->Connect(id, SteadyNow() + within, daemon.callback());
    link_ = trainer_.Connect(id, 1, SteadyNow() + within, [](const absl::Status&) {});
    nccl::WarmUp(trainer_.shared_device(), *link_, pair_->handle(), 1, {memory_, 4096},
                 {memory_ + 8192, 2048}, nullptr, SteadyNow() + within, trainer.callback());
    trainer_heard_ = trainer.Wait();
    return daemon.Wait();
  }

  void TrainerSends(std::vector<nccl::Piece> pieces, Heard& heard) {
    nccl::Exchange exchange;
    exchange.sends = std::move(pieces);
    exchange.deadline = SteadyNow() + absl::Seconds(10);
    exchange.done = heard.callback();
    ASSERT_TRUE(link_->Post(std::move(exchange)).ok());
  }

  PairTable table_{Platform(), {.patience = absl::Seconds(10)}};
  nccl::Worker trainer_;
  char* memory_;
  std::shared_ptr<Pair> pair_;
  std::shared_ptr<nccl::Link> link_;
  absl::Status trainer_heard_;
};

TEST_F(PairTest, TakesWhatTheTrainerSendsAndSendsBack) {
  ASSERT_TRUE(Connect().ok());
  ASSERT_TRUE(trainer_heard_.ok()) << trainer_heard_;
  EXPECT_EQ(table_.pairs(), 1);
  EXPECT_EQ(table_.bytes(), 2 * 4096 + 2048);
  const std::int64_t at = pair_->layout().windows[1].offset;
  // Two small regions with a gap between them travel as one.
  std::memcpy(memory_, "one.three", 9);
  Heard sent, received;
  TrainerSends({{memory_, 9}}, sent);
  ASSERT_TRUE(pair_->Receive(1, 1, {{at, 3}, {at + 4, 5}, {at + 16, 0}},
                             SteadyNow() + absl::Seconds(10), received.callback())
                  .ok());
  EXPECT_TRUE(received.Wait().ok());
  EXPECT_TRUE(sent.Wait().ok());
  EXPECT_EQ(std::string(reinterpret_cast<char*>(*pair_->Region(1, at + 4, 5, true)), 5), "three");

  const std::int64_t pull = pair_->layout().windows[2].offset;
  std::memcpy(*pair_->Region(2, pull, 4, false), "back", 4);
  Heard gone, come;
  ASSERT_TRUE(
      pair_->Send(2, {{pull, 4}}, SteadyNow() + absl::Seconds(10), gone.callback()).ok());
  EXPECT_TRUE(absl::IsUnavailable(
      pair_->Send(2, {{pull, 4}}, SteadyNow(), [](const absl::Status&) {})));
  EXPECT_TRUE(
      absl::IsUnavailable(pair_->AwaitSent({pull, 4}, SteadyNow() + absl::Milliseconds(20))));
  nccl::Exchange exchange;
  exchange.receives = {{memory_ + 8192, 4}};
  exchange.deadline = SteadyNow() + absl::Seconds(10);
  exchange.done = come.callback();
  ASSERT_TRUE(link_->Post(std::move(exchange)).ok());
  EXPECT_TRUE(come.Wait().ok());
  EXPECT_TRUE(gone.Wait().ok());
  EXPECT_EQ(std::string(memory_ + 8192, 4), "back");
  EXPECT_TRUE(pair_->AwaitSent({pull, 4}, SteadyNow() + absl::Seconds(10)).ok());
}

TEST_F(PairTest, SendsOnePieceBehindTheOther) {
  ASSERT_TRUE(Connect().ok());
  const std::int64_t pull = pair_->layout().windows[2].offset;
  std::memcpy(*pair_->Region(2, pull, 8, false), "onetwo", 6);
  const absl::Time deadline = SteadyNow() + absl::Seconds(10);
  Heard first, second;
  ASSERT_TRUE(pair_->Send(2, {{pull, 3}}, deadline, first.callback()).ok());
  // What lies beside it may be written and sent while nobody has taken the first.
  EXPECT_TRUE(pair_->AwaitSent({pull + 3, 3}, SteadyNow()).ok());
  ASSERT_TRUE(pair_->Send(2, {{pull + 3, 3}}, deadline, second.callback()).ok());
  for (const std::int64_t at : {0, 2, 3, 5}) {
    EXPECT_TRUE(absl::IsUnavailable(pair_->AwaitSent({pull + at, 1}, SteadyNow()))) << at;
  }
  EXPECT_TRUE(pair_->AwaitSent({pull + 6, 1}, SteadyNow()).ok());
  const auto take = [&](std::ptrdiff_t to) {
    Heard come;
    nccl::Exchange exchange;
    exchange.receives = {{memory_ + to, 3}};
    exchange.deadline = deadline;
    exchange.done = come.callback();
    ASSERT_TRUE(link_->Post(std::move(exchange)).ok());
    EXPECT_TRUE(come.Wait().ok());
  };
  take(8192);
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(pair_->AwaitSent({pull, 3}, deadline).ok());
  EXPECT_TRUE(absl::IsUnavailable(pair_->AwaitSent({pull + 3, 3}, SteadyNow())));
  take(8195);
  EXPECT_TRUE(second.Wait().ok());
  EXPECT_EQ(std::string(memory_ + 8192, 6), "onetwo");
}

TEST_F(PairTest, RefusesPlacesThatAreNotInTheWindow) {
  ASSERT_TRUE(Connect().ok());
  const auto receive = [&](std::int64_t window, std::vector<nccl::Region> regions,
                           std::int64_t sequence = 1) {
    return pair_->Receive(window, sequence, regions, SteadyNow() + absl::Milliseconds(50),
                          [](const absl::Status&) { FAIL() << "it was begun"; });
  };
  const std::int64_t max = std::numeric_limits<std::int64_t>::max();
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{0, 4097}})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{4096, 1}})));  // the next window's
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{-1, 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{8, max}})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{max, 8}})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{0, -8}})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(0, {{0, 8}, {4, 8}})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(2, {{8192, 8}})));  // the trainer's
  EXPECT_TRUE(absl::IsInvalidArgument(receive(3, {})));
  EXPECT_TRUE(absl::IsInvalidArgument(receive(-1, {})));
  EXPECT_TRUE(absl::IsFailedPrecondition(receive(0, {{0, 8}}, 2)));
  EXPECT_TRUE(absl::IsFailedPrecondition(receive(0, {{0, 8}}, 0)));
}

TEST_F(PairTest, AHandleServesItsOwnTrainerAndNoForgedOneServes) {
  ASSERT_TRUE(Connect().ok());
  const std::string handle = pair_->handle();
  ASSERT_GE(handle.size(), 16u);
  EXPECT_TRUE(table_.Find(handle, kOwner).ok());
  for (const ArenaOwner& other : {ArenaOwner{"r", 2}, ArenaOwner{"s", 3}, ArenaOwner{"", 0}}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(table_.Find(handle, other).status()));
    table_.CloseHandle(handle, other, absl::CancelledError("never"));
  }
  std::string changed = handle;
  changed.back() ^= 1;
  for (const std::string& forged : {changed, handle + "0", handle.substr(1), std::string()}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(table_.Find(forged, kOwner).status()));
  }
  EXPECT_TRUE(table_.Find(handle, kOwner).ok()) << "nobody else has closed it";
}

TEST_F(PairTest, AFillThatComesEarlyWaitsForItsTurn) {
  ASSERT_TRUE(Connect().ok());
  std::memcpy(memory_, "firstsecond", 11);
  Heard sent, one, two;
  TrainerSends({{memory_, 5}}, sent);
  Heard sent_too;
  TrainerSends({{memory_ + 5, 6}}, sent_too);
  const absl::Time deadline = SteadyNow() + absl::Seconds(10);
  std::thread early(
      [&] { EXPECT_TRUE(pair_->Receive(1, 2, {{4096, 6}}, deadline, two.callback()).ok()); });
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_TRUE(pair_->Receive(0, 1, {{0, 5}}, deadline, one.callback()).ok());
  early.join();
  EXPECT_TRUE(one.Wait().ok());
  EXPECT_TRUE(two.Wait().ok());
  EXPECT_EQ(std::string(reinterpret_cast<char*>(*pair_->Region(0, 0, 5, true)), 5), "first");
  EXPECT_EQ(std::string(reinterpret_cast<char*>(*pair_->Region(1, 4096, 6, true)), 6), "second");
}

TEST_F(PairTest, AnEndThatMovesNothingIsFoundOutWhenTheyMeet) {
  nccl::fake::SetFaults({.move_nothing = true});
  // Whichever end looks first has found it out, and may not answer the other any more.
  const absl::Status daemon_heard = Connect();
  for (const absl::Status& heard : {daemon_heard, trainer_heard_}) {
    EXPECT_TRUE(absl::IsDataLoss(heard) || absl::IsDeadlineExceeded(heard)) << heard;
  }
  EXPECT_TRUE(absl::IsDataLoss(daemon_heard) || absl::IsDataLoss(trainer_heard_));
  EXPECT_FALSE(pair_->status().ok());
}

TEST_F(PairTest, ATrainerThatDiesEndsWhatIsUnderWayInTime) {
  ASSERT_TRUE(Connect().ok());
  nccl::fake::SetFaults({.silent = kTrainerGpu});
  Heard received;
  ASSERT_TRUE(pair_->Receive(0, 1, {{0, 8}}, SteadyNow() + absl::Milliseconds(200),
                             received.callback())
                  .ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(received.Wait()));
  EXPECT_THAT(Text(pair_->status()), HasSubstr("run \"r\": NCCL pair of rank 3: NCCL: exchange"));
  link_.reset();
  nccl::fake::SetFaults({});
  EXPECT_TRUE(Connect().ok());  // the GPU is fine, and so is a new trainer
}

TEST_F(PairTest, ClosingEndsWhatIsUnderWayAndFreesTheWindows) {
  ASSERT_TRUE(Connect().ok());
  Heard received;
  ASSERT_TRUE(pair_->Receive(0, 1, {{0, 8}}, SteadyNow() + absl::Seconds(10),
                             received.callback())
                  .ok());
  Heard revoked;
  pair_->OnRevoked(revoked.callback());
  table_.CloseHandle("another", kOwner, absl::CancelledError("never"));
  EXPECT_EQ(table_.pairs(), 1);
  EXPECT_TRUE(table_.Find(pair_->handle(), kOwner).ok());
  table_.CloseHandle(pair_->handle(), kOwner, absl::CancelledError("the trainer is gone"));
  EXPECT_TRUE(absl::IsCancelled(received.Wait()));
  EXPECT_TRUE(absl::IsCancelled(revoked.Wait()));
  EXPECT_THAT(Text(table_.Find(pair_->handle(), kOwner).status()), HasSubstr("open one"));
  pair_.reset();
  for (int i = 0; i < 1000 && table_.bytes() > 0; ++i) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(table_.bytes(), 0);
  EXPECT_EQ(nccl::fake::Count().device_bytes, 16384);  // the trainer's
}

TEST_F(PairTest, OpeningAnotherReplacesARanksPair) {
  ASSERT_TRUE(Connect().ok());
  const auto former = pair_;
  link_.reset();
  ASSERT_TRUE(Connect().ok());
  EXPECT_EQ(table_.pairs(), 1);
  EXPECT_THAT(Text(former->status()), HasSubstr("the rank has opened another"));
}

TEST_F(PairTest, ChecksTheTrainerBeforeAnythingIsMade) {
  const auto refusal = [&](const PairTrainer& trainer) {
    nccl::UniqueId id;
    return table_.Open(kOwner, trainer, kSize, &id).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(refusal({kVersion, kDaemonGpu})));
  EXPECT_THAT(Text(refusal({kVersion, kDaemonGpu})), HasSubstr("NCCL refuses two ranks there"));
  EXPECT_TRUE(absl::IsFailedPrecondition(refusal({22803, kTrainerGpu})));
  EXPECT_TRUE(absl::IsFailedPrecondition(refusal({0, kTrainerGpu})));
  EXPECT_TRUE(absl::IsFailedPrecondition(refusal({kVersion, ""})));
  PairTable none(absl::FailedPreconditionError("NCCL: it is not here"), {});
  EXPECT_THAT(Text(none.Check({kVersion, kTrainerGpu})), HasSubstr("it is not here"));
  EXPECT_EQ(none.nccl_version(), 0);
  EXPECT_EQ(table_.bytes(), 0);
  EXPECT_FALSE(LayOutPair({100, 1, 256}).ok());
  EXPECT_FALSE(LayOutPair({256, 0, 256}).ok());
  EXPECT_FALSE(LayOutPair({256, 1, 0}).ok());
}

}  // namespace
}  // namespace muond
