// A run spread over daemons: parameters of which only some slices, or none, are here, and what the
// daemons must have been told alike.
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
using ::testing::Not;
using Code = absl::StatusCode;

// ---- Slices that live elsewhere ---------------------------------------------------------------

// "w" is cut: slices 0 and 2 of rank 0 and none of rank 1 reach daemon 0. "v" is on daemon 1, "u"
// on daemon 0.
std::vector<StepLayout> Partly() {
  StepLayout whole{2, {Sliced("w", 0, {3, 1}), Sliced("v", 1, {1, 1}), Replicated("u", 2, {1, 1})}};
  std::vector<StepLayout> layouts = Spread(whole, 2, {0, 1, 0});
  for (StepLayout& layout : layouts) layout.parameters[0].here = StepLayout::Here::kSome;
  layouts[0].parameters[0].slices_here = {{0, {0, 2}}};
  layouts[1].parameters[0].slices_here = {{0, {1, 2}}, {1, {0}}};
  return layouts;
}

TEST(StepMachineSpread, AParameterIsReducedOnceTheSlicesThatReachHereAreIn) {
  Daemons d(Partly());
  d[0].BeginAll();
  EXPECT_TRUE(d[0].Push({0, 0, 2, 0}).ok());
  EXPECT_TRUE(d[0].reduces.empty());
  EXPECT_TRUE(d[0].Push({0, 0, 0, 0}).ok());
  ASSERT_EQ(d[0].reduces.size(), 1u);
  EXPECT_THAT(d[0].reduces[0].layers, ElementsAre(Layer{0, -1, 0}));
}

TEST(StepMachineSpread, ASliceThatLivesElsewhereIsRefused) {
  Daemons d(Partly());
  d[0].BeginAll();
  for (const SliceId& id : {SliceId{0, 0, 1, 0}, SliceId{0, 1, 0, 0}, SliceId{1, 0, 0, 0}}) {
    const absl::Status status = d[0].Admit(id).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("has no element in what this daemon owns"));
    EXPECT_EQ(d[0].Push(id).status().code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(d[0].Admit({0, 0, 3, 0}).status().code(), Code::kNotFound) << "not registered at all";
  EXPECT_EQ(d[0].Admit({0, 0, -1, 0}).status().code(), Code::kNotFound);
}

TEST(StepMachineSpread, MissingSlicesAreThoseThatBelongHere) {
  Daemons d(Partly());
  d[0].BeginAll();
  EXPECT_TRUE(d[0].Push({0, 0, 0, 0}).ok());
  const std::uint64_t waiter = d[0].Finish(0);
  d[0].Finish(1);
  EXPECT_EQ(d[0].machine.WaitingSlices(), 3) << "slice 2 of w, and u of both ranks";
  d[0].Deadline(waiter);
  EXPECT_THAT(d[0].Message(waiter), HasSubstr("parameter \"w\": slices [2] of rank 0"));
  EXPECT_THAT(d[0].Message(waiter), HasSubstr("parameter \"u\""));
  EXPECT_THAT(d[0].Message(waiter), Not(HasSubstr("parameter \"v\"")));
}

TEST(StepMachineSpread, EachDaemonCommitsItsOwn) {
  Daemons d(Partly());
  const auto waiters = d.FinishAll();
  d.TellAll();
  ASSERT_EQ(d[0].commits.size(), 1u);
  EXPECT_THAT(d[0].commits[0].absent, ElementsAre(1));
  EXPECT_THAT(d[1].commits[0].absent, ElementsAre(2));
  EXPECT_EQ(d[0].Outcome(waiters[0][0]), d[1].Outcome(waiters[1][0]));
}

TEST(StepMachineSpread, ADaemonThatOwnsNothingVotesWhenAllHaveFinished) {
  Daemons d(Spread(OneParameter(2), 2, {0}));
  d[1].BeginAll();
  d[1].Finish(0);
  EXPECT_THAT(d[1].votes, IsEmpty());
  d[1].Finish(1);
  ASSERT_EQ(d[1].votes.size(), 1u);
  EXPECT_EQ(d[1].votes[0].sum_squares.Value(), 0);
  EXPECT_THAT(d[1].reduces, IsEmpty());
  d.Finish(0);
  d.TellAll();
  EXPECT_THAT(d[1].commits.at(0).absent, ElementsAre(0));
}

TEST(StepMachineSpread, EveryDaemonChecksWhatIsAbsentOverAllThatIsRegistered) {
  // "w" has nothing on daemon 1, which must come to the same conclusion all the same.
  Daemons d(Spread(OneParameter(2), 2, {0}));
  for (int daemon = 0; daemon < 2; ++daemon) {
    d[daemon].BeginAll();
    const std::uint64_t first = d[daemon].Finish(0, {"w"});
    const std::uint64_t second = d[daemon].Finish(1);
    for (const std::uint64_t waiter : {first, second}) {
      EXPECT_EQ(d[daemon].Code(waiter), Code::kFailedPrecondition);
      EXPECT_THAT(d[daemon].Message(waiter), HasSubstr("absent on ranks [0] but not on ranks [1]"));
    }
    EXPECT_THAT(d[daemon].votes, IsEmpty());
  }
  const auto waiters = d.FinishAll({"w"});
  d.TellAll();
  EXPECT_TRUE(d[1].Outcome(waiters[1][0]).applied) << "they agree, and finish again";
}

TEST(StepMachineSpread, AReplicatedParameterMayBeAbsentOnSomeRanks) {
  StepLayout whole{3, {Replicated("r", 0, {1, 1, 1}), Sliced("w", 1, {1, 0, 0})}};
  Daemons d(Spread(whole, 2, {0, 1}));
  for (int daemon = 0; daemon < 2; ++daemon) {
    d[daemon].BeginAll();
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      for (const SliceId& id : d[daemon].SlicesOf(rank)) {
        if (id.parameter == 0 && rank == 1) continue;
        EXPECT_TRUE(d[daemon].Push(id).ok());
      }
      d[daemon].Finish(rank,
                       rank == 1 ? std::vector<std::string>{"r"} : std::vector<std::string>{});
    }
  }
  d.TellAll();
  EXPECT_THAT(d[0].LayersOf(0), ElementsAre(Layer{0, 0, 0}, Layer{0, 2, 0}));
  EXPECT_EQ(d[1].machine.next_step(), 1);
}

TEST(StepMachineSpread, TiedNamesAreCutAlike) {
  StepLayout whole{2, {Sliced("emb", 0, {2, 0}), Sliced("head", 0, {0, 2})}};
  std::vector<StepLayout> layouts = Spread(whole, 2, {});
  for (int daemon = 0; daemon < 2; ++daemon) {
    for (auto& parameter : layouts[daemon].parameters) parameter.here = StepLayout::Here::kSome;
    layouts[daemon].parameters[0].slices_here = {{0, {daemon}}};
    layouts[daemon].parameters[1].slices_here = {{1, {daemon}}};
  }
  Daemons d(layouts);
  const auto waiters = d.FinishAll();
  d.TellAll();
  EXPECT_THAT(d[0].LayersOf(0), ElementsAre(Layer{0, -1, 0}, Layer{0, -1, 1}));
  EXPECT_EQ(d[0].Outcome(waiters[0][0]), d[1].Outcome(waiters[1][1]));
}

// ---- What the daemons must have been told alike -----------------------------------------------

// Daemon 0 was told `begin`, daemon 1 the usual; both have all votes.
void ExpectNoVerdict(Daemons& d, std::uint64_t waiter, std::uint64_t other) {
  d.TellAll();
  for (int daemon = 0; daemon < 2; ++daemon) {
    const std::uint64_t mine = daemon == 0 ? waiter : other;
    EXPECT_EQ(d[daemon].Code(mine), Code::kInvalidArgument);
    EXPECT_THAT(d[daemon].Message(mine), HasSubstr("daemons [d0] and [d1] different things"));
    EXPECT_TRUE(d[daemon].commits.empty());
    EXPECT_EQ(d[daemon].machine.next_step(), 0);
  }
}

std::uint64_t FinishWith(MachineDriver& d, const StepBegin& begin) {
  EXPECT_TRUE(d.Begin(0, begin).ok());
  d.micro_batches = begin.micro_batches;
  d.PushAll(0);
  return d.Finish(0);
}

TEST(StepMachineTerms, OtherHyperparametersAllowNoVerdict) {
  Daemons d(OneEach(2, 1));
  StepBegin begin = d[0].NextBegin();
  begin.adamw["g"].eps = 1e-6;
  const std::uint64_t waiter = FinishWith(d[0], begin);
  ExpectNoVerdict(d, waiter, d.Finish(1)[0]);
  const std::uint64_t again = d[1].Finish(0);
  EXPECT_EQ(d[1].Code(again), Code::kInvalidArgument) << "it stays so in this generation";
}

TEST(StepMachineTerms, OtherMicroBatchesAllowNoVerdict) {
  Daemons d(OneEach(2, 1));
  StepBegin begin = d[0].NextBegin();
  begin.micro_batches = 2;
  const std::uint64_t waiter = FinishWith(d[0], begin);
  ExpectNoVerdict(d, waiter, d.Finish(1)[0]);
}

TEST(StepMachineTerms, AnotherLossScaleAllowsNoVerdict) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  spec.loss_scale.initial = 1;
  Daemons d(OneEach(2, 1), spec);
  StepBegin begin = d[0].NextBegin();
  begin.loss_scale = 256;
  const std::uint64_t waiter = FinishWith(d[0], begin);
  ExpectNoVerdict(d, waiter, d.Finish(1)[0]);
}

TEST(StepMachineTerms, OtherAbsentParametersAllowNoVerdict) {
  Daemons d(OneEach(2, 1));
  d[0].BeginAll();
  d[0].PushAll(0);
  const std::uint64_t waiter = d[0].Finish(0, {"p1"});
  ExpectNoVerdict(d, waiter, d.Finish(1)[0]);
}

TEST(StepMachineTerms, ASkipOnOneDaemonOnlyAllowsNoVerdict) {
  Daemons d(OneEach(2, 1));
  const std::uint64_t waiter = d[0].Skip(0, SkipCause::kTrainer);
  ExpectNoVerdict(d, waiter, d.Finish(1)[0]);
}

TEST(StepMachineTerms, SkipsOfAnotherCauseAllowNoVerdict) {
  Daemons d(OneEach(2, 1));
  const std::uint64_t waiter = d[0].Skip(0, SkipCause::kTrainer);
  ExpectNoVerdict(d, waiter, d[1].Skip(0, SkipCause::kOverflow));
}

TEST(StepMachineTerms, GroupsThatAreLeftOutCountAsTheirLastValues) {
  Daemons d(OneEach(2, 1));
  StepBegin begin = d[0].NextBegin();
  begin.muon["g"] = d[0].machine.muon().at("g");
  const std::uint64_t waiter = FinishWith(d[0], begin);
  d.Finish(1);
  d.TellAll();
  EXPECT_TRUE(d[0].Outcome(waiter).applied);
}

TEST(StepMachineTerms, ZerosOfEitherSignAreTheSame) {
  // Ranks with 0.0 and -0.0 agree; which of them a daemon hears first must not matter.
  Daemons d(OneEach(2, 1));
  std::vector<std::uint64_t> waiters;
  for (int daemon = 0; daemon < 2; ++daemon) {
    StepBegin begin = d[daemon].NextBegin();
    begin.muon["g"].weight_decay = daemon == 0 ? 0.0 : -0.0;
    waiters.push_back(FinishWith(d[daemon], begin));
  }
  d.TellAll();
  EXPECT_TRUE(d[0].Outcome(waiters[0]).applied);
}

// ---- Skips ------------------------------------------------------------------------------------

TEST(StepMachineSpread, ASkipNeedsEveryDaemonToo) {
  Daemons d(OneEach(2, 2), DynamicSpec(LossScalePolicy::kTorch));
  std::vector<std::vector<std::uint64_t>> waiters(2);
  for (int daemon = 0; daemon < 2; ++daemon) {
    for (std::int64_t rank = 0; rank < 2; ++rank) waiters[daemon].push_back(d[daemon].Skip(rank));
    EXPECT_FALSE(d[daemon].Replied(waiters[daemon][0]));
  }
  d[0].Deadline(waiters[0][0]);
  EXPECT_THAT(d[0].Message(waiters[0][0]), HasSubstr("skip by rank 0"));
  EXPECT_THAT(d[0].Message(waiters[0][0]), HasSubstr("votes of daemons [d1]"));
  const std::uint64_t again = d[0].Skip(0);
  d.TellAll();
  EXPECT_EQ(d[0].Outcome(again).cause, SkipCause::kOverflow);
  EXPECT_EQ(d[0].Outcome(again), d[1].Outcome(waiters[1][1]));
  EXPECT_EQ(d[0].Outcome(again).next_loss_scale, 32768);
}

TEST(StepMachineSpread, ASkipNamesNoOtherScaleOnceItsVoteIsCast) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  Daemons d(OneEach(2, 1), spec);
  const std::uint64_t first = d[0].Skip(0, SkipCause::kOverflow);
  const std::uint64_t other = d[1].Skip(0, SkipCause::kOverflow);
  EXPECT_EQ(d[0].Code(d[0].Skip(0, SkipCause::kOverflow, 512)), Code::kInvalidArgument);
  d.TellAll();
  EXPECT_EQ(d[0].Outcome(first), d[1].Outcome(other));
}

}  // namespace
}  // namespace muond
