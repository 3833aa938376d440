#include "server/registry/spec_diff.h"

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/registry/run_for_test.h"

namespace muond {
namespace {

RunSpec SomeRun() {
  RunSpec run = RunOf({Tensor("w", {4, 4}), Tensor("b", {4})});
  run.rules = {{"x", Algorithm::kAdamW}};
  return run;
}

TEST(FirstDifference, NothingBetweenEquals) {
  EXPECT_EQ(FirstDifference(SomeRun(), SomeRun()), "");
}

struct Case {
  std::function<void(RunSpec*)> change;
  const char* says;
};

// Each field on its own: one that the differ forgets would show as "the specifications differ".
void ExpectDifferences(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    RunSpec sent = SomeRun();
    c.change(&sent);
    EXPECT_EQ(FirstDifference(SomeRun(), sent), c.says);
  }
}

TEST(FirstDifference, OfParametersNamesTheFieldAndBothValues) {
  ExpectDifferences({
      {[](RunSpec* r) { r->name = "s"; }, "name: the run has \"r\", this rank sent \"s\""},
      {[](RunSpec* r) { r->world_size = 2; }, "world_size: the run has 1, this rank sent 2"},
      {[](RunSpec* r) { r->parameters[1].name = "c"; },
       "parameter 1: the run has \"b\", this rank sent \"c\""},
      {[](RunSpec* r) { r->parameters.pop_back(); },
       "number of parameters: the run has 2, this rank sent 1"},
      {[](RunSpec* r) {
         r->parameters[0].shape = Dims{2, 4};
       },
       "parameter \"w\": shape: the run has [4, 4], this rank sent [2, 4]"},
      {[](RunSpec* r) { r->parameters[0].shape.reset(); },
       "parameter \"w\": shape: the run has [4, 4], this rank sent none"},
      {[](RunSpec* r) { r->parameters[0].allow_empty = true; },
       "parameter \"w\": allow_empty: the run has false, this rank sent true"},
      {[](RunSpec* r) { r->parameters[0].dtype = Dtype::kBF16; },
       "parameter \"w\": dtype: the run has f32, this rank sent bf16"},
      {[](RunSpec* r) { r->parameters[0].group = "h"; },
       "parameter \"w\": group: the run has \"g\", this rank sent \"h\""},
      {[](RunSpec* r) { r->parameters[0].kind = Kind::kMatrix; },
       "parameter \"w\": kind: the run has unspecified, this rank sent matrix"},
      {[](RunSpec* r) { r->parameters[0].role = Role::kOther; },
       "parameter \"w\": role: the run has unspecified, this rank sent other"},
      {[](RunSpec* r) { r->parameters[0].exclude = true; },
       "parameter \"w\": exclude: "
       "the run has false, this rank sent true"},
      {[](RunSpec* r) { r->parameters[0].replicated = true; },
       "parameter \"w\": replicated: the run has false, this rank sent true"},
      {[](RunSpec* r) { r->parameters[0].tie = "T"; },
       "parameter \"w\": tie: the run has \"\", this rank sent \"T\""},
      {[](RunSpec* r) { r->parameters[0].tie_reduction = TieReduction::kSame; },
       "parameter \"w\": tie_reduction: the run has sum, this rank sent same"},
      {[](RunSpec* r) {
         r->parameters[0].split.sizes = {1, 3};
       },
       "parameter \"w\": split: sizes: the run has [], this rank sent [1, 3]"},
      {[](RunSpec* r) { r->parameters[0].split.groups = 2; },
       "parameter \"w\": split: groups: the run has 1, this rank sent 2"},
      {[](RunSpec* r) { r->parameters[0].split.interleaved = true; },
       "parameter \"w\": split: interleaved: the run has false, this rank sent true"},
      {[](RunSpec* r) { r->parameters[0].split.per_head = true; },
       "parameter \"w\": split: per_head: the run has false, this rank sent true"},
  });
}

TEST(FirstDifference, OfGroupsNamesTheFieldAndBothValues) {
  ExpectDifferences({
      {[](RunSpec* r) { r->groups[0].name = "h"; },
       "group 0: the run has \"g\", this rank sent \"h\""},
      {[](RunSpec* r) { r->groups.push_back({}); },
       "number of groups: the run has 1, this rank sent 2"},
      {[](RunSpec* r) { r->groups[0].algorithm = Algorithm::kMuon; },
       "group \"g\": algorithm: the run has auto, this rank sent muon"},
      {[](RunSpec* r) { r->groups[0].muon.lr = 0.5; },
       "group \"g\": muon: lr: the run has 0.001, this rank sent 0.5"},
      {[](RunSpec* r) { r->groups[0].muon.weight_decay = 0.5; },
       "group \"g\": muon: weight_decay: the run has 0.10000000000000001, this rank sent 0.5"},
      {[](RunSpec* r) { r->groups[0].muon.momentum = 0.5; },
       "group \"g\": muon: momentum: the run has 0.94999999999999996, this rank sent 0.5"},
      {[](RunSpec* r) { r->groups[0].adamw.beta1 = 0.5; },
       "group \"g\": adamw: beta1: the run has 0.90000000000000002, this rank sent 0.5"},
      {[](RunSpec* r) { r->groups[0].adamw.beta2 = 0.5; },
       "group \"g\": adamw: beta2: the run has 0.999, this rank sent 0.5"},
      {[](RunSpec* r) { r->groups[0].adamw.eps = 0.5; },
       "group \"g\": adamw: eps: the run has 1e-08, this rank sent 0.5"},
      {[](RunSpec* r) { r->groups[0].nesterov = false; },
       "group \"g\": nesterov: the run has true, this rank sent false"},
      {[](RunSpec* r) { r->groups[0].momentum_sum_form = true; },
       "group \"g\": momentum_sum_form: the run has false, this rank sent true"},
      {[](RunSpec* r) { r->groups[0].momentum_dtype = Dtype::kBF16; },
       "group \"g\": momentum_dtype: the run has f32, this rank sent bf16"},
      {[](RunSpec* r) { r->groups[0].coefficients = "cubic5"; },
       "group \"g\": coefficients: the run has \"simple\", this rank sent \"cubic5\""},
      {[](RunSpec* r) {
         r->groups[0].custom_steps = {2, -1.5, 0.5};
       },
       "group \"g\": custom_steps: the run has [], this rank sent [2, -1.5, 0.5]"},
      {[](RunSpec* r) { r->groups[0].ns_steps = 5; },
       "group \"g\": ns_steps: the run has 0, this rank sent 5"},
      {[](RunSpec* r) { r->groups[0].ns_method = "gram"; },
       "group \"g\": ns_method: the run has \"auto\", this rank sent \"gram\""},
      {[](RunSpec* r) { r->groups[0].norm_floor = 1; },
       "group \"g\": norm_floor: the run has 0, this rank sent 1"},
      {[](RunSpec* r) { r->groups[0].shape_factor = ShapeFactor::kUnitRms; },
       "group \"g\": shape_factor: the run has original, this rank sent unit_rms"},
      {[](RunSpec* r) { r->groups[0].extra_factor = 2; },
       "group \"g\": extra_factor: the run has 1, this rank sent 2"},
      {[](RunSpec* r) { r->groups[0].weight_decay_form = WeightDecayForm::kIndependent; },
       "group \"g\": weight_decay_form: the run has decoupled, this rank sent independent"},
  });
}

TEST(FirstDifference, OfTheRestNamesTheFieldAndBothValues) {
  ExpectDifferences({
      {[](RunSpec* r) { r->rules[0].pattern = "y"; },
       "rule 0: pattern: the run has \"x\", this rank sent \"y\""},
      {[](RunSpec* r) { r->rules[0].algorithm = Algorithm::kMuon; },
       "rule 0: algorithm: the run has adamw, this rank sent muon"},
      {[](RunSpec* r) { r->rules.clear(); }, "number of rules: the run has 1, this rank sent 0"},
      {[](RunSpec* r) { r->loss_scale.mode = LossScaleMode::kDynamic; },
       "loss_scale: mode: the run has none, this rank sent dynamic"},
      {[](RunSpec* r) { r->loss_scale.policy = LossScalePolicy::kMegatron; },
       "loss_scale: policy: the run has torch, this rank sent megatron"},
      {[](RunSpec* r) { r->loss_scale.initial = 1; },
       "loss_scale: initial: the run has 65536, this rank sent 1"},
      {[](RunSpec* r) { r->loss_scale.growth_factor = 4; },
       "loss_scale: growth_factor: the run has 2, this rank sent 4"},
      {[](RunSpec* r) { r->loss_scale.backoff_factor = 0.25; },
       "loss_scale: backoff_factor: the run has 0.5, this rank sent 0.25"},
      {[](RunSpec* r) { r->loss_scale.window = 3; },
       "loss_scale: window: the run has 0, this rank sent 3"},
      {[](RunSpec* r) { r->loss_scale.hysteresis = 3; },
       "loss_scale: hysteresis: the run has 0, this rank sent 3"},
      {[](RunSpec* r) { r->loss_scale.minimum = 3; },
       "loss_scale: minimum: the run has 0, this rank sent 3"},
      {[](RunSpec* r) { r->loss_scale.error_after = 3; },
       "loss_scale: error_after: the run has 0, this rank sent 3"},
      {[](RunSpec* r) { r->max_grad_norm = 1; }, "max_grad_norm: the run has 0, this rank sent 1"},
      {[](RunSpec* r) { r->clip_policy = ClipPolicy::kAll; },
       "clip_policy: the run has adamw_only, this rank sent all"},
      {[](RunSpec* r) { r->grad_norm_skip_threshold = 1; },
       "grad_norm_skip_threshold: the run has 0, this rank sent 1"},
      {[](RunSpec* r) { r->reduce_ranks = Reduction::kSum; },
       "reduce_ranks: the run has mean, this rank sent sum"},
      {[](RunSpec* r) { r->reduce_micro_batches = Reduction::kMean; },
       "reduce_micro_batches: the run has sum, this rank sent mean"},
  });
}

TEST(FirstDifference, IsTheFirstOfSeveral) {
  RunSpec sent = SomeRun();
  sent.max_grad_norm = 1;
  sent.parameters[1].exclude = true;
  sent.parameters[0].dtype = Dtype::kF16;
  sent.parameters[0].exclude = true;
  EXPECT_EQ(FirstDifference(SomeRun(), sent),
            "parameter \"w\": dtype: the run has f32, this rank sent f16");
}

}  // namespace
}  // namespace muond
