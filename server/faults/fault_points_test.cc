#include "server/faults/fault_points.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muond {
namespace {

using ::testing::HasSubstr;

std::string Fires(FaultInjector& faults, FaultPoint point, int times) {
  std::string pattern;
  for (int i = 0; i < times; ++i) pattern += faults.Fire(point) ? 'x' : '.';
  return pattern;
}

TEST(FaultPoints, TableHasOneRowPerPointInOrderWithItsOwnName) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < FaultPoints().size(); ++i) {
    const FaultPointInfo& info = FaultPoints()[i];
    EXPECT_EQ(static_cast<std::size_t>(info.point), i);
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_STRNE(info.where, "");
    EXPECT_STRNE(info.simulates, "");
  }
}

TEST(FaultInjector, NothingFiresByDefault) {
  FaultInjector faults;
  for (const FaultPointInfo& info : FaultPoints()) {
    EXPECT_FALSE(faults.Fire(info.point)) << info.name;
    EXPECT_EQ(faults.fired(info.point), 0);
  }
}

TEST(FaultInjector, FiresOnceByDefault) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kFailCommit);
  EXPECT_EQ(Fires(faults, FaultPoint::kFailCommit, 4), "x...");
}

TEST(FaultInjector, PassesThenFiresThenIsSpent) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kFailReduce, 2, 3);
  EXPECT_EQ(Fires(faults, FaultPoint::kFailReduce, 8), "..xxx...");
  EXPECT_EQ(faults.fired(FaultPoint::kFailReduce), 3);
}

TEST(FaultInjector, CountZeroFiresForever) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kDelayCommit, 1, FaultInjector::kForever);
  EXPECT_EQ(Fires(faults, FaultPoint::kDelayCommit, 6), ".xxxxx");
}

TEST(FaultInjector, PointsAreIndependent) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kMomentumNan);
  EXPECT_FALSE(faults.Fire(FaultPoint::kDelayCommit));
  EXPECT_TRUE(faults.Fire(FaultPoint::kMomentumNan));
}

TEST(FaultInjector, DisarmStopsAllAndKeepsTheCounts) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kMomentumNan, 0, FaultInjector::kForever);
  EXPECT_TRUE(faults.Fire(FaultPoint::kMomentumNan));
  faults.Disarm();
  EXPECT_FALSE(faults.Fire(FaultPoint::kMomentumNan));
  EXPECT_EQ(faults.fired(FaultPoint::kMomentumNan), 1);
}

TEST(FaultInjector, ArmingAgainStartsOver) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kFailCommit, 0, 5);
  EXPECT_TRUE(faults.Fire(FaultPoint::kFailCommit));
  faults.Arm(FaultPoint::kFailCommit, 1, 1);
  EXPECT_EQ(Fires(faults, FaultPoint::kFailCommit, 4), ".x..");
}

TEST(FaultInjector, ReadsSpecs) {
  FaultInjector faults;
  ASSERT_TRUE(faults.ArmFromSpec("fail_commit,drop_push_reply:1,delay_commit:0:0").ok());
  EXPECT_EQ(Fires(faults, FaultPoint::kFailCommit, 3), "x..");
  EXPECT_EQ(Fires(faults, FaultPoint::kDropPushReply, 3), ".x.");
  EXPECT_EQ(Fires(faults, FaultPoint::kDelayCommit, 3), "xxx");
}

TEST(FaultInjector, EmptySpecArmsNothing) {
  FaultInjector faults;
  EXPECT_TRUE(faults.ArmFromSpec("").ok());
  for (const FaultPointInfo& info : FaultPoints()) EXPECT_FALSE(faults.Fire(info.point));
}

TEST(FaultInjector, EveryNameOfTheTableCanBeArmed) {
  for (const FaultPointInfo& info : FaultPoints()) {
    FaultInjector faults;
    ASSERT_TRUE(faults.ArmFromSpec(info.name).ok()) << info.name;
    EXPECT_TRUE(faults.Fire(info.point)) << info.name;
  }
}

TEST(FaultInjector, UnknownPointIsNamedBesideTheKnownOnes) {
  FaultInjector faults;
  const absl::Status status = faults.ArmFromSpec("fail_commit,fail_comit:1");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"fail_comit\""));
  EXPECT_THAT(std::string(status.message()), HasSubstr("newton_schulz_fallback_nan"));
  EXPECT_FALSE(faults.Fire(FaultPoint::kFailCommit)) << "a bad spec arms nothing";
}

TEST(FaultInjector, BadNumbersAreRefusedByName) {
  for (const char* spec : {"fail_commit:x", "fail_commit:-1", "fail_commit:1:", "fail_commit:1:2:3",
                           "fail_commit:99999999999999999999"}) {
    FaultInjector faults;
    const absl::Status status = faults.ArmFromSpec(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << spec;
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"fail_commit\"")) << spec;
    EXPECT_FALSE(faults.Fire(FaultPoint::kFailCommit)) << spec;
  }
}

TEST(FaultInjector, ThreadsShareOnePlan) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kFailReduce, 100, 50);
  std::atomic<int> fired{0};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) fired += faults.Fire(FaultPoint::kFailReduce) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fired, 50);
}

// Another process sees it stop, and lets it go on.
TEST(FaultInjector, AProcessStopsWhereItIsToldTo) {
  FaultInjector faults;
  faults.Arm(FaultPoint::kStopInCommit, 1);
  const pid_t child = fork();
  if (child == 0) {
    faults.StopHere(FaultPoint::kStopInCommit);  // lets the first one pass
    faults.StopHere(FaultPoint::kStopInCommit);
    faults.StopHere(FaultPoint::kStopInCommit);  // spent
    _exit(7);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(state));
  ASSERT_EQ(kill(child, SIGCONT), 0);
  ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
  ASSERT_TRUE(WIFEXITED(state));
  EXPECT_EQ(WEXITSTATUS(state), 7);
}

}  // namespace
}  // namespace muond
