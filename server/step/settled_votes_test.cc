// Raising the generation of several daemons: promises, settled votes, and what they protect.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/daemons_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using Code = absl::StatusCode;

Vote VoteFor(std::int64_t step, std::int64_t generation = 1) {
  Vote vote;
  vote.step = step;
  vote.generation = generation;
  return vote;
}

// ---- Promises ---------------------------------------------------------------------------------

TEST(Prepare, PromisesWhatIsKnownOfThisStepAndTheLast) {
  Daemons d(OneEach(2, 1));
  d.FinishAll();
  d.TellAll();
  const std::vector<CastVote> last = d[0].machine.VotesOf(0);
  d.Finish(0);
  const auto promise = d[0].machine.OnPrepare(2);
  ASSERT_TRUE(promise.ok());
  EXPECT_EQ(promise->next_step, 1);
  EXPECT_THAT(promise->votes, UnorderedElementsAre(last[0], last[1], d.NewestVote(0)));
}

TEST(Prepare, NoVoteIsTakenAfterAPromise) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  d.PrepareAll(2);
  const absl::Status late = d.Tell(1, 0);
  EXPECT_EQ(late.code(), Code::kAborted);
  EXPECT_THAT(std::string(late.message()), HasSubstr("generation 1 is being raised to 2"));
  EXPECT_TRUE(d[0].commits.empty());
  d[0].Deadline(waiters[0][0]);
  EXPECT_THAT(d[0].Message(waiters[0][0]),
              HasSubstr("missing: generation 2, which is being raised"));
}

TEST(Prepare, NoVoteIsCastAfterAPromise) {
  Daemons d(OneEach(2, 1));
  d.Finish(1);
  EXPECT_TRUE(d.Tell(1, 0).ok());
  ASSERT_TRUE(d[0].machine.OnPrepare(2).ok());
  const auto waiters = d.Finish(0);
  EXPECT_THAT(d[0].votes, IsEmpty());
  EXPECT_TRUE(d[0].commits.empty());
  d[0].Raise(2);
  EXPECT_EQ(d[0].Code(waiters[0]), Code::kAborted);
  d.Finish(0);
  EXPECT_EQ(d[0].votes.size(), 1u) << "it votes again in the new generation";
  EXPECT_EQ(d[0].votes[0].generation, 2);
}

TEST(Prepare, NoSkipIsCastAfterAPromise) {
  Daemons d(OneEach(2, 1));
  ASSERT_TRUE(d[0].machine.OnPrepare(2).ok());
  const std::uint64_t waiter = d[0].Skip(0);
  EXPECT_THAT(d[0].votes, IsEmpty());
  EXPECT_FALSE(d[0].Replied(waiter));
}

TEST(Prepare, BindsADaemonWithoutOthersToo) {
  MachineDriver d(OneParameter(1));
  ASSERT_TRUE(d.machine.OnPrepare(2).ok());
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  EXPECT_TRUE(d.commits.empty());
  d.Raise(2);
  EXPECT_EQ(d.Code(waiter), Code::kAborted);
  EXPECT_TRUE(d.Step().applied);
}

TEST(Prepare, IsRefusedBelowWhatWasPromisedOrRaised) {
  Daemons d(OneEach(2, 1));
  ASSERT_TRUE(d[0].machine.OnPrepare(5).ok());
  EXPECT_EQ(d[0].machine.OnPrepare(4).status().code(), Code::kFailedPrecondition);
  EXPECT_TRUE(d[0].machine.OnPrepare(5).ok()) << "a repeat";
  EXPECT_TRUE(d[0].machine.OnPrepare(7).ok());
  d[0].Raise(7);
  const auto late = d[0].machine.OnPrepare(7);
  EXPECT_EQ(late.status().code(), Code::kFailedPrecondition);
  EXPECT_THAT(std::string(late.status().message()), HasSubstr("at generation 7"));
}

TEST(Prepare, ARepeatAfterTheCommitStillTellsTheVotes) {
  Daemons d(OneEach(2, 1));
  d[0].answers = false;
  d.FinishAll();
  d[0].Reduce();
  d.TellAll();
  const auto before = d[0].machine.OnPrepare(2);
  d[0].Commit();
  const auto after = d[0].machine.OnPrepare(2);
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_EQ(before->next_step, 0);
  EXPECT_EQ(after->next_step, 1);
  EXPECT_EQ(before->votes, after->votes);
  EXPECT_EQ(before->votes.size(), 2u);
}

// ---- Lineages ---------------------------------------------------------------------------------

TEST(Lineage, IsPromisedAndThatOfTheMachinesStart) {
  StepMachine machine(OneParameter(1), Spec(), {.generation = 7, .next_step = 3, .lineage = 5});
  EXPECT_EQ(machine.lineage(), 5);
  EXPECT_EQ(machine.OnPrepare(8)->lineage, 5);
  Effects effects;
  machine.OnGeneration(8, {}, effects);
  EXPECT_EQ(machine.lineage(), 5) << "a generation alone keeps the state";
}

TEST(Lineage, OfOneAllMayGoOn) {
  EXPECT_TRUE(CheckOneLineage({"a", "b"}, {{4, {}, 5}, {5, {}, 5}}).ok());
}

// A re-initialization that was broken off half way, then a plain raise.
TEST(Lineage, OfDaemonsThatDifferIsNamedWithWhatHelps) {
  const absl::Status status =
      CheckOneLineage({"a", "b", "c", "d"}, {{4, {}, 1}, {4, {}, 5}, {4, {}, 1}, {0, {}, 0}});
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(HasSubstr("daemons [a, c] have that of generation 1"),
                               HasSubstr("daemons [b] have that of generation 5"),
                               HasSubstr("daemons [d] have none"), HasSubstr("reinitialize"),
                               HasSubstr("restore a checkpoint")));
}

// ---- Settled votes ----------------------------------------------------------------------------

TEST(SettledVotes, AreThoseOfTheLowestStepIfComplete) {
  const CastVote a{0, VoteFor(4)}, b{1, VoteFor(4)}, next{0, VoteFor(5)};
  EXPECT_THAT(SettledVotes(2, {{5, {a, b, next}}, {4, {b}}}), ElementsAre(a, b));
  EXPECT_THAT(SettledVotes(2, {{4, {a}}, {4, {b}}}), ElementsAre(a, b))
      << "nobody knew both, but somebody may be told the other's any moment";
  EXPECT_THAT(SettledVotes(2, {{5, {a, b, next}}, {5, {b}}}), IsEmpty());
  EXPECT_THAT(SettledVotes(2, {{4, {a}}, {4, {}}}), IsEmpty());
  EXPECT_THAT(SettledVotes(1, {{4, {a}}}), ElementsAre(a));
}

TEST(SettledVotes, OfTwoGenerationsDoNotMix) {
  const CastVote a{0, VoteFor(4, 2)}, b{1, VoteFor(4, 1)}, old{0, VoteFor(4, 1)};
  EXPECT_THAT(SettledVotes(2, {{4, {a}}, {4, {b}}}), IsEmpty());
  EXPECT_THAT(SettledVotes(2, {{4, {a, old}}, {4, {b}}}), ElementsAre(old, b));
}

// ---- Raising ----------------------------------------------------------------------------------

TEST(Raise, AStepThatOneDaemonAppliedIsAppliedByTheOthers) {
  Daemons d(OneEach(3, 1));
  const auto waiters = d.FinishAll();
  EXPECT_TRUE(d.Tell(1, 0).ok());
  EXPECT_TRUE(d.Tell(2, 0).ok());  // daemon 0 applies it, the others know their own votes only
  ASSERT_EQ(d[0].machine.next_step(), 1);
  const auto settled = SettledVotes(3, d.PrepareAll(2));
  EXPECT_EQ(settled.size(), 3u);
  for (int daemon = 0; daemon < 3; ++daemon) {
    d[daemon].Raise(2, settled);
    EXPECT_EQ(d[daemon].commits.size(), 1u);
    EXPECT_EQ(d[daemon].machine.next_step(), 1);
    EXPECT_EQ(d[daemon].Outcome(waiters[daemon][0]), d[0].Outcome(waiters[0][0]));
  }
  const auto next = d.FinishAll();
  d.TellAll();
  EXPECT_EQ(d[2].Outcome(next[2][0]).step, 1);
}

TEST(Raise, AStepThatOneDaemonSkippedIsSkippedByTheOthers) {
  Daemons d(OneEach(2, 1), DynamicSpec(LossScalePolicy::kTorch));
  d[0].facts[0] = Overflowed();
  const auto waiters = d.FinishAll();
  EXPECT_TRUE(d.Tell(1, 0).ok());
  d[1].Raise(2, SettledVotes(2, d.PrepareAll(2)));
  EXPECT_EQ(d[1].Outcome(waiters[1][0]), d[0].Outcome(waiters[0][0]));
  EXPECT_EQ(d[1].Outcome(waiters[1][0]).cause, SkipCause::kOverflow);
  EXPECT_FALSE(d[1].machine.step_in_flight());
}

TEST(Raise, AStepWithoutAllVotesStartsOverEverywhere) {
  Daemons d(OneEach(2, 2));
  const auto first = d.Finish(0);
  d[1].BeginAll();
  const auto settled = SettledVotes(2, d.PrepareAll(2));
  EXPECT_THAT(settled, IsEmpty());
  for (int daemon = 0; daemon < 2; ++daemon) {
    d[daemon].Raise(2, settled);
    EXPECT_EQ(d[daemon].discards, 1);
    EXPECT_FALSE(d[daemon].machine.step_in_flight());
  }
  for (const std::uint64_t waiter : first) {
    EXPECT_EQ(d[0].Code(waiter), Code::kAborted);
    EXPECT_THAT(d[0].Message(waiter), HasSubstr("restart the step from begin"));
  }
  EXPECT_THAT(d[0].machine.VotesOf(0), IsEmpty()) << "votes end with their generation";
  const auto again = d.FinishAll();
  d.TellAll();
  EXPECT_EQ(d[0].Outcome(again[0][0]), d[1].Outcome(again[1][0]));
}

TEST(Raise, ACommitUnderWayGoesOn) {
  Daemons d(OneEach(2, 1));
  d[0].answers = false;
  const auto waiters = d.FinishAll();
  d[0].Reduce();
  d.TellAll();
  ASSERT_TRUE(d[0].commit_open);
  const auto settled = SettledVotes(2, d.PrepareAll(2));
  d[0].Raise(2, settled);
  d[1].Raise(2, settled);
  EXPECT_FALSE(d[0].Replied(waiters[0][0]));
  // Daemon 1 is already voting on the next step.
  d.Finish(1);
  EXPECT_TRUE(d.Tell(1, 0).ok());
  d[0].answers = true;
  d[0].Commit();
  EXPECT_TRUE(d[0].Outcome(waiters[0][0]).applied);
  EXPECT_EQ(d[0].discards, 0);
  const auto next = d.Finish(0);
  EXPECT_EQ(d[0].Outcome(next[0]).step, 1);
}

TEST(Raise, TwiceDuringOneCommit) {
  Daemons d(OneEach(2, 1));
  d[0].answers = d[1].answers = false;
  const auto waiters = d.FinishAll();
  d[0].Reduce();
  d[1].Reduce();
  EXPECT_TRUE(d.Tell(1, 0).ok());
  // The first try reaches daemon 0 only; the second must find the votes of the first generation.
  d[0].Raise(2, SettledVotes(2, d.PrepareAll(2)));
  const auto settled = SettledVotes(2, d.PrepareAll(3));
  EXPECT_EQ(settled.size(), 2u);
  d[0].Raise(3, settled);
  d[1].Raise(3, settled);
  d[0].Commit();
  d[1].Commit();
  EXPECT_EQ(d[1].Outcome(waiters[1][0]), d[0].Outcome(waiters[0][0]));
}

TEST(Raise, BrokenOffHalfWayLosesNothing) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  // Nobody has both votes; the settled ones reach daemon 0 only.
  d[0].Raise(2, SettledVotes(2, d.PrepareAll(2)));
  EXPECT_EQ(d[0].machine.next_step(), 1);
  EXPECT_EQ(d[1].machine.next_step(), 0);
  const auto settled = SettledVotes(2, d.PrepareAll(3));
  d[0].Raise(3, settled);
  d[1].Raise(3, settled);
  EXPECT_EQ(d[1].Outcome(waiters[1][0]), d[0].Outcome(waiters[0][0]));
}

TEST(Raise, OvertakenIsIgnored) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.FinishAll();
  const auto settled = SettledVotes(2, d.PrepareAll(2));
  d.PrepareAll(3);
  d[0].Raise(2, settled);
  EXPECT_EQ(d[0].machine.generation(), 1) << "whoever raises to 3 relies on the promise";
  EXPECT_FALSE(d[0].Replied(waiters[0][0]));
  EXPECT_EQ(d[0].machine.OnPrepare(2).status().code(), Code::kFailedPrecondition);
}

TEST(Raise, OnlyUpwards) {
  Daemons d(OneEach(2, 1));
  d[0].Raise(4);
  d[0].BeginAll();
  d[0].Raise(4);
  d[0].Raise(3);
  EXPECT_EQ(d[0].machine.generation(), 4);
  EXPECT_TRUE(d[0].machine.step_in_flight());
}

TEST(Raise, SettledVotesOfAnotherGenerationOrDaemonAreLeftOut) {
  Daemons d(OneEach(2, 1));
  const auto waiters = d.Finish(0);
  d[0].Raise(2, {{1, VoteFor(0, 3)}, {2, d.NewestVote(0).vote}, {-1, d.NewestVote(0).vote}});
  EXPECT_EQ(d[0].Code(waiters[0]), Code::kAborted);
  EXPECT_TRUE(d[0].commits.empty());
}

TEST(Raise, VotesForTheNextStepEndWithTheirGeneration) {
  Daemons d(OneEach(2, 1));
  d.FinishAll();
  EXPECT_TRUE(d.Tell(1, 0).ok());
  d.Finish(0);
  EXPECT_TRUE(d.Tell(0, 1).ok());  // early
  const auto settled = SettledVotes(2, d.PrepareAll(2));
  d[0].Raise(2, settled);
  d[1].Raise(2, settled);
  ASSERT_EQ(d[1].machine.next_step(), 1);
  d.Finish(1);
  EXPECT_EQ(d[1].commits.size(), 1u) << "the early vote was of generation 1";
  d.Finish(0);
  d.TellAll();
  EXPECT_EQ(d[1].commits.size(), 2u);
}

TEST(Raise, EndsADisagreement) {
  Daemons d(OneEach(2, 1));
  StepBegin begin = d[0].NextBegin();
  begin.muon["g"].lr = 0.5;
  ASSERT_TRUE(d[0].Begin(0, begin).ok());
  d[0].PushAll(0);
  const std::uint64_t waiter = d[0].Finish(0);
  const auto others = d.Finish(1);
  // Settled on different terms: a verdict on no daemon.
  const auto settled = SettledVotes(2, d.PrepareAll(2));
  EXPECT_EQ(settled.size(), 2u);
  d[0].Raise(2, settled);
  d[1].Raise(2, settled);
  EXPECT_EQ(d[0].Code(waiter), Code::kInvalidArgument);
  EXPECT_EQ(d[1].Code(others[0]), Code::kInvalidArgument);
  EXPECT_EQ(d[0].machine.next_step(), 0);
  const auto again = d.FinishAll();
  d.TellAll();
  EXPECT_TRUE(d[0].Outcome(again[0][0]).applied);
}

TEST(StepStart, IsWhereAMachineGoesOnWithoutItsFormerState) {
  StepMachine machine(OneParameter(1), Spec(), {.generation = 6, .next_step = 41});
  EXPECT_EQ(machine.generation(), 6);
  EXPECT_EQ(machine.version(), 41);
  Effects effects;
  EXPECT_EQ(machine.OnBegin(0, 5, {.step = 41, .muon = {}, .adamw = {}}, effects).code(),
            Code::kFailedPrecondition);
  EXPECT_TRUE(machine.OnBegin(0, 6, {.step = 41, .muon = {}, .adamw = {}}, effects).ok());
  EXPECT_EQ(machine.OnPrepare(6).status().code(), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace muond
