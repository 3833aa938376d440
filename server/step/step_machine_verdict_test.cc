// From complete gradients to the outcome: reductions, verdicts, loss scale, counters.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/step/machine_driver_for_test.h"

namespace muond {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// ---- Reductions -------------------------------------------------------------------------------

TEST(StepMachineReduce, ComesWithTheLastSliceBeforeAnyFinish) {
  MachineDriver d({2, {Sliced("w", 0, {2, 1})}});
  d.BeginAll();
  EXPECT_TRUE(d.Push({0, 1, 0, 0}).ok());
  EXPECT_TRUE(d.Push({0, 0, 1, 0}).ok());
  EXPECT_TRUE(d.reduces.empty()) << "one slice of three is missing";
  EXPECT_TRUE(d.Push({0, 0, 0, 0}).ok());
  ASSERT_EQ(d.reduces.size(), 1u);
  EXPECT_THAT(d.reduces[0].layers, ElementsAre(Layer{0, -1, 0}));
}

TEST(StepMachineReduce, EachMicroBatchOfASlicedParameterIsALayer) {
  MachineDriver d(OneParameter(2));
  d.micro_batches = 3;
  d.Step();
  ASSERT_EQ(d.reduces.size(), 1u) << "once, whatever the number of micro-batches";
  EXPECT_THAT(d.reduces[0].layers, ElementsAre(Layer{0, -1, 0}, Layer{1, -1, 0}, Layer{2, -1, 0}));
  EXPECT_EQ(d.reduces[0].divisor, 1.0) << "micro-batches are summed by default";
}

TEST(StepMachineReduce, LayersOfReplicasAreInMicroBatchThenRankOrder) {
  MachineDriver d({2, {Replicated("r", 0, {1, 1})}});
  d.micro_batches = 2;
  d.Step();
  ASSERT_EQ(d.reduces.size(), 1u);
  EXPECT_THAT(d.reduces[0].layers,
              ElementsAre(Layer{0, 0, 0}, Layer{0, 1, 0}, Layer{1, 0, 0}, Layer{1, 1, 0}));
}

TEST(StepMachineReduce, DivisorFollowsTheDeclaredReductionsAndTheScale) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kStatic;
  spec.loss_scale.initial = 128;
  const StepLayout layout = {4, {Replicated("r", 0, {1, 1, 1, 1}), Sliced("s", 1, {1, 1, 1, 1})}};
  const auto divisors = [&](Reduction ranks, Reduction micro_batches) {
    spec.reduce_ranks = ranks;
    spec.reduce_micro_batches = micro_batches;
    MachineDriver d(layout, spec);
    d.micro_batches = 3;
    d.Step();
    std::map<int, double> found;
    for (const ReduceEffect& reduce : d.reduces) found[reduce.state] = reduce.divisor;
    return std::vector<double>{found.at(0), found.at(1)};
  };
  EXPECT_THAT(divisors(Reduction::kSum, Reduction::kSum), ElementsAre(128, 128));
  EXPECT_THAT(divisors(Reduction::kMean, Reduction::kSum), ElementsAre(4 * 128, 128));
  EXPECT_THAT(divisors(Reduction::kSum, Reduction::kMean), ElementsAre(3 * 128, 3 * 128));
  EXPECT_THAT(divisors(Reduction::kMean, Reduction::kMean), ElementsAre(12 * 128, 3 * 128));
}

// "emb" on rank 0 and "head" on rank 1 share the state of "emb"; gradients are summed.
StepLayout Tied() {
  StepLayout layout = {
      2, {Sliced("emb", 0, {1, 0}), Sliced("w", 1, {1, 1}), Sliced("head", 0, {0, 1})}};
  return layout;
}

TEST(StepMachineReduce, TiedNamesAreLayersOfOneState) {
  MachineDriver d(Tied());
  d.Step();
  EXPECT_EQ(d.reduces.size(), 2u);
  EXPECT_THAT(d.LayersOf(0), ElementsAre(Layer{0, -1, 0}, Layer{0, -1, 2}));
  EXPECT_TRUE(d.commits.at(0).absent.empty()) << "a tied name is no state of its own";
}

TEST(StepMachineReduce, LayersOfATieAreInMicroBatchThenNameOrder) {
  MachineDriver d(Tied());
  d.micro_batches = 2;
  d.Step();
  EXPECT_THAT(d.LayersOf(0),
              ElementsAre(Layer{0, -1, 0}, Layer{0, -1, 2}, Layer{1, -1, 0}, Layer{1, -1, 2}));
}

TEST(StepMachineReduce, LayersOfATieOfReplicasAreInMicroBatchRankNameOrder) {
  MachineDriver d({2, {Replicated("emb", 0, {1, 1}), Replicated("head", 0, {0, 1})}});
  d.Step();
  EXPECT_THAT(d.LayersOf(0), ElementsAre(Layer{0, 0, 0}, Layer{0, 1, 0}, Layer{0, 1, 1}));
}

TEST(StepMachineReduce, ATieIsPresentIfAnyOfItsNamesIs) {
  MachineDriver d(Tied());
  d.Step({"head"});
  EXPECT_TRUE(d.commits.at(0).absent.empty());
  EXPECT_THAT(d.LayersOf(0), ElementsAre(Layer{0, -1, 0}));
  d.Step({"emb", "head"});
  EXPECT_THAT(d.commits.at(1).absent, ElementsAre(0));
}

TEST(StepMachineReduce, NamesWithoutSlicesNeedNothing) {
  // A tensor without elements, and a name tied as the same tensor.
  MachineDriver d({1, {Sliced("w", 0, {1}), Sliced("empty", 1, {}), Sliced("same", 0, {0})}});
  EXPECT_TRUE(d.Step().applied);
  ASSERT_EQ(d.reduces.size(), 1u);
  EXPECT_THAT(d.reduces[0].layers, ElementsAre(Layer{0, -1, 0}));
  EXPECT_THAT(d.commits.at(0).absent, ElementsAre(1));
}

TEST(StepMachineReduce, AFinishThatIsWithdrawnDoesNotFixTheLayers) {
  // Rank 1 names "r" absent, its Finish is withdrawn because of "s", then it sends "r" after all.
  MachineDriver d({2, {Sliced("s", 0, {1, 1}), Replicated("r", 1, {1, 1})}});
  d.BeginAll();
  ASSERT_TRUE(d.Push({0, 0, 0, 0}).ok());
  ASSERT_TRUE(d.Push({1, 0, 0, 0}).ok());
  d.Finish(0);
  EXPECT_EQ(d.Code(d.Finish(1, {"s", "r"})), Code::kFailedPrecondition);
  d.PushAll(1);
  d.Finish(0);
  EXPECT_TRUE(d.Outcome(d.Finish(1)).applied);
  EXPECT_THAT(d.LayersOf(1), ElementsAre(Layer{0, 0, 1}, Layer{0, 1, 1}));
}

TEST(StepMachineReduce, ModelOptimizer1621_RanksWithoutSlicesJoinAndAllEnds) {
  MachineDriver d({2, {Sliced("w", 0, {1, 0})}});
  EXPECT_TRUE(d.Step().applied);
}

TEST(StepMachineReduce, Megatron5203_OneRankOneParameter) {
  MachineDriver d(OneParameter(1));
  EXPECT_TRUE(d.Step().applied);
}

// ---- Verdicts and outcomes --------------------------------------------------------------------

TEST(StepMachineVerdict, CommitCarriesTheClipCoefficient) {
  RunSpec spec = Spec();
  spec.max_grad_norm = 1;
  MachineDriver d(OneParameter(1), spec);
  const StepOutcome outcome = d.Step();
  EXPECT_EQ(outcome.grad_norm, 5.0);
  EXPECT_EQ(outcome.clip_coefficient, 1.0 / (5.0 + 1e-6));
  EXPECT_EQ(d.commits.at(0).clip_coefficient, outcome.clip_coefficient);
}

TEST(StepMachineVerdict, OneOverflowSkipsAllParametersAndCommitsNothing) {
  MachineDriver d({1, {Sliced("a", 0, {1}), Sliced("b", 1, {1}), Sliced("c", 2, {1})}});
  d.facts[1] = Overflowed(3);
  d.facts[2] = Overflowed(2);
  const StepOutcome outcome = d.Step();
  EXPECT_FALSE(outcome.applied);
  EXPECT_EQ(outcome.cause, SkipCause::kOverflow);
  EXPECT_EQ(outcome.nonfinite_elements, 5);
  EXPECT_EQ(outcome.grad_norm, 0.0);
  EXPECT_THAT(outcome.offenders, ElementsAre("b", "c"));
  EXPECT_TRUE(d.commits.empty());
  EXPECT_EQ(d.discards, 1);
}

TEST(StepMachineVerdict, AnOverflowFoundEarlyIsNotLost) {
  MachineDriver d({2, {Sliced("a", 0, {1, 0}), Sliced("b", 1, {0, 1})}});
  d.facts[0] = Overflowed();
  d.BeginAll();
  d.PushAll(0);  // reduced and judged now, long before the step is complete
  d.Finish(0);
  d.PushAll(1);
  EXPECT_EQ(d.Outcome(d.Finish(1)).cause, SkipCause::kOverflow);
}

TEST(StepMachineVerdict, OffendersAreTheFirstEightInRegistrationOrder) {
  StepLayout layout;
  for (int i = 0; i < 12; ++i) {
    layout.parameters.push_back(Sliced(std::string(1, static_cast<char>('z' - i)), i, {1}));
  }
  MachineDriver d(layout);
  for (int i = 1; i < 12; ++i) d.facts[i] = Overflowed();
  EXPECT_THAT(d.Step().offenders, ElementsAre("y", "x", "w", "v", "u", "t", "s", "r"));
}

TEST(StepMachineVerdict, StateOverflowSkipsAndLeavesTheScale) {
  MachineDriver d(OneParameter(1), DynamicSpec(LossScalePolicy::kTorch));
  d.facts[0].state_overflow = true;
  const StepOutcome outcome = d.Step();
  EXPECT_EQ(outcome.cause, SkipCause::kStateOverflow);
  EXPECT_EQ(outcome.next_loss_scale, 65536);
  EXPECT_TRUE(d.commits.empty());
}

TEST(StepMachineVerdict, LVSM19_ANormThresholdSkipThenANormalStep) {
  RunSpec spec = DynamicSpec(LossScalePolicy::kTorch);
  spec.grad_norm_skip_threshold = 10;
  MachineDriver d(OneParameter(1), spec);
  d.Step();
  const LossScalerState before = d.machine.scaler().state();
  d.facts[0].block_sums = {2500};
  EXPECT_EQ(d.Step().cause, SkipCause::kNormThreshold);
  EXPECT_EQ(d.machine.scaler().state(), before);
  d.facts[0].block_sums = {1};
  EXPECT_TRUE(d.Step().applied);
  EXPECT_EQ(d.machine.scaler().state().good_steps, before.good_steps + 1);
}

TEST(StepMachineVerdict, DeepSpeed8432_OverflowLeavesNextStepAlone) {
  MachineDriver d(OneParameter(1), DynamicSpec(LossScalePolicy::kTorch));
  d.facts[0] = Overflowed();
  const StepOutcome skipped = d.Step();
  EXPECT_FALSE(skipped.applied);
  EXPECT_EQ(skipped.applied_steps, 0);
  d.facts.clear();
  const StepOutcome applied = d.Step();
  EXPECT_TRUE(applied.applied);
  EXPECT_EQ(applied.applied_steps, 1) << "a skip consumes a step, not the optimizer's t";
  EXPECT_EQ(applied.step, 1);
  EXPECT_EQ(applied.nonfinite_elements, 0);
  EXPECT_EQ(d.reduces.at(1).divisor, 32768) << "made with the scale that the skip left";
}

TEST(StepMachineVerdict, CountersAddUp) {
  MachineDriver d(OneParameter(1));
  d.Step();
  d.facts[0] = Overflowed();
  d.Step();
  const StepOutcome second = d.Step();
  EXPECT_EQ(second.applied_steps, 1);
  EXPECT_EQ(second.skipped_steps, 2);
  EXPECT_EQ(second.consecutive_skips, 2);
  EXPECT_EQ(second.version, 3);
  d.facts.clear();
  EXPECT_EQ(d.Step().consecutive_skips, 0);
}

TEST(StepMachineVerdict, CommitFactsReachTheOutcome) {
  MachineDriver d(OneParameter(1));
  d.commit_facts = {
      .newton_schulz_calls = 5, .newton_schulz_fallbacks = 2, .zero_inputs = 1, .failure = ""};
  const StepOutcome outcome = d.Step();
  EXPECT_EQ(outcome.newton_schulz_calls, 5);
  EXPECT_EQ(outcome.newton_schulz_fallbacks, 2);
  EXPECT_EQ(outcome.zero_inputs, 1);
}

// ---- Loss scale -------------------------------------------------------------------------------

TEST(StepMachineScale, PyTorch115710_AllRanksSeeOneScale) {
  MachineDriver d(OneParameter(4), DynamicSpec(LossScalePolicy::kMegatron));
  d.facts[0] = Overflowed();
  EXPECT_EQ(d.Step().next_loss_scale, 65536) << "uses up hysteresis";
  EXPECT_EQ(d.Step().next_loss_scale, 32768);
}

TEST(StepMachineScale, DeepSpeed2695_NormIsThatOfTheScaleTheGradientsWereMadeWith) {
  RunSpec spec = DynamicSpec(LossScalePolicy::kTorch);
  spec.loss_scale.initial = 4;
  spec.loss_scale.window = 1;
  MachineDriver d(OneParameter(1), spec);
  d.facts[0].block_sums = {1};
  const StepOutcome outcome = d.Step();
  EXPECT_EQ(d.reduces.at(0).divisor, 4.0);
  EXPECT_EQ(outcome.next_loss_scale, 8) << "growth fires in this step";
  EXPECT_EQ(outcome.loss_scale, 4);
  EXPECT_EQ(outcome.grad_norm, 1.0);
  EXPECT_EQ(d.outcomes.at(0).scale_change, ScaleChange::kGrowth);
}

TEST(StepMachineScale, DeepSpeed8588_AStaticScaleIsDividedOut) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kStatic;
  spec.loss_scale.initial = 128;
  MachineDriver d(OneParameter(1), spec);
  d.facts[0].block_sums = {1};
  EXPECT_EQ(d.Step().grad_norm, 1.0);
  EXPECT_EQ(d.reduces.at(0).divisor, 128.0);
}

TEST(StepMachineScale, DeepSpeed4986_StartsAt65536) {
  MachineDriver d(OneParameter(1), DynamicSpec(LossScalePolicy::kDeepSpeed));
  EXPECT_EQ(d.machine.scaler().scale(), 65536);
  EXPECT_EQ(d.Step().loss_scale, 65536);
}

TEST(StepMachineScale, GptNeox291_ErrorAfterNConsumesTheStepAndRepeatsAlike) {
  RunSpec spec = DynamicSpec(LossScalePolicy::kMegatron);
  spec.loss_scale.initial = 4;
  spec.loss_scale.hysteresis = 1;
  spec.loss_scale.error_after = 3;
  MachineDriver d(OneParameter(1), spec);
  d.facts[0] = Overflowed();
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(d.Step().applied);
  d.BeginAll();
  d.PushAll(0);
  const std::uint64_t waiter = d.Finish(0);
  EXPECT_EQ(d.Code(waiter), Code::kFailedPrecondition);
  EXPECT_THAT(d.Message(waiter), HasSubstr("3 overflows in a row at the minimum 1"));
  EXPECT_EQ(d.machine.next_step(), 5) << "the step was consumed";
  EXPECT_EQ(d.outcomes.back().outcome.skipped_steps, 5);
  EXPECT_EQ(d.Status(d.FinishAt(4, 0)), d.Status(waiter));
  d.facts.clear();
  EXPECT_TRUE(d.Step().applied) << "state is intact, a good step goes on";
}

TEST(StepMachineScale, GptNeox291_OtherSkipsAtTheMinimumAreNoError) {
  RunSpec spec = DynamicSpec(LossScalePolicy::kMegatron);
  spec.loss_scale.initial = 1;
  spec.loss_scale.hysteresis = 1;
  spec.loss_scale.error_after = 1;
  MachineDriver d(OneParameter(1), spec);
  d.facts[0] = Overflowed();
  d.BeginAll();
  d.PushAll(0);
  EXPECT_EQ(d.Code(d.Finish(0)), Code::kFailedPrecondition);
  EXPECT_FALSE(d.Outcome(d.Skip(0, SkipCause::kTrainer)).applied);
}

TEST(StepMachineScale, ExternalScaleMayChangeEveryStep) {
  RunSpec spec = Spec();
  spec.loss_scale.mode = LossScaleMode::kExternal;
  MachineDriver d(OneParameter(1), spec);
  for (const double scale : {1024.0, 512.0, 3.0}) {
    StepBegin begin = d.NextBegin();
    begin.loss_scale = scale;
    ASSERT_TRUE(d.Begin(0, begin).ok());
    d.PushAll(0);
    EXPECT_EQ(d.Outcome(d.Finish(0)).loss_scale, scale);
    EXPECT_EQ(d.reduces.back().divisor, scale);
  }
}

TEST(StepMachineDeathTest, AnAnswerNobodyAskedForIsAnError) {
  MachineDriver d(OneParameter(1));
  Effects effects;
  EXPECT_DEATH(d.machine.OnReduced(d.machine.attempt(), 0, {}, effects), "question");
  EXPECT_DEATH(d.machine.OnCommitted({}, effects), "question");
}

TEST(StepMachineDeathTest, ATieIsReplicatedAsAWholeOrNot) {
  const StepLayout layout = {1, {Sliced("a", 0, {1}), Replicated("b", 0, {1})}};
  EXPECT_DEATH(StepMachine(layout, Spec()), "tie");
}

}  // namespace
}  // namespace muond
