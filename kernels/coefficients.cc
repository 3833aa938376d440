// The tuples of docs/semantics.md section 10 and how their limits were derived.
//
// healthy: the largest RMS residual of p over the spectra of Gaussian matrices from 64 x 64 to
// 768 x 3072. low_rank_residual = sqrt(0.25 + 0.75 healthy^2): a missing direction has residual 1.
// residual_max = 1.05 max(1, max p^2 - 1); the 1 belongs to a missing direction, since p(0) = 0.
#include "kernels/coefficients.h"

#include <algorithm>

namespace muond::kernels {
namespace {

constexpr NewtonSchulzStep kSimple{3.4445, -4.7750, 2.0315};

constexpr NewtonSchulzStep kDion1{8.156554524902461, -22.48329292557795, 15.878769915207462};
constexpr NewtonSchulzStep kDion2{4.042929935166739, -2.808917465908714, 0.5000178451051316};
constexpr NewtonSchulzStep kDion3{3.8916678022926607, -2.772484153217685, 0.5060648178503393};
constexpr NewtonSchulzStep kDion4{3.285753657755655, -2.3681294933425376, 0.46449024233003106};
constexpr NewtonSchulzStep kDion5{2.3465413258596377, -1.7097828382687081, 0.42323551169305323};

using Steps = std::vector<NewtonSchulzStep>;

Steps Express101() {
  return {{8.2051, -22.9019, 16.4607},
          {4.0664, -2.8612, 0.5184},
          {3.9096, -2.8234, 0.5250},
          {3.2856, -2.4153, 0.4853},
          {2.2779, -1.6198, 0.3985}};
}

Steps Express101Of8() {
  Steps steps = Express101();
  steps.insert(steps.end(),
               {{1.8726, -1.2307, 0.3585}, {1.8564, -1.2132, 0.3568}, {1.8750, -1.2500, 0.3750}});
  return steps;
}

Steps DeepSeekV4() {
  Steps steps(8, kSimple);
  steps.insert(steps.end(), 2, NewtonSchulzStep{2, -1.5, 0.5});
  return steps;
}

// What every set that settles within [0, sqrt(2)] allows.
constexpr double kSettled = 1.05;
// polar_express_dion3 and _dion4 leave out steps that would pull large values back: p reaches
// 2.877, hence a residual of 7.277, on healthy input.
constexpr double kOvershooting = 7.65;

std::vector<CoefficientSet> MakeSets() {
  std::vector<CoefficientSet> sets;
  sets.push_back({"simple", Steps(5, kSimple), "KellerJordan/Muon, torch.optim.Muon, DeepSpeed",
                  0.60, kSettled, true});
  sets.push_back({"quintic_yj",
                  {{4.0848, -6.8946, 2.9270},
                   {3.9505, -6.3029, 2.6377},
                   {3.7418, -5.5913, 2.3037},
                   {2.8769, -3.1427, 1.2046},
                   {2.8366, -3.0525, 1.2012}},
                  "You Jiacheng; `quintic` of Emerging-Optimizers and Megatron-Core",
                  0.53,
                  kSettled,
                  true});
  sets.push_back({"polar_express_105",
                  {{7.892583, -20.383014, 13.555306},
                   {3.911485, -2.546464, 0.426899},
                   {3.760658, -2.512819, 0.432365},
                   {3.160400, -2.149650, 0.399637},
                   {2.191097, -1.441662, 0.328146}},
                  "Dao-AILab/gram-newton-schulz: base set divided by 1.05^(1,3,5)",
                  0.54,
                  kSettled,
                  true});
  sets.push_back({"polar_express_dion",
                  {kDion1, kDion2, kDion3, kDion4, kDion5},
                  "microsoft/dion, modded-nanogpt, nanochat",
                  0.54,
                  kSettled,
                  true});
  sets.push_back({"polar_express_101", Express101(), "Emerging-Optimizers", 0.54, kSettled, false});
  sets.push_back({"polar_express_101_8", Express101Of8(), "Emerging-Optimizers, eight steps", 0.51,
                  kSettled, false});
  sets.push_back({"polar_express_dion4",
                  {kDion1, kDion2, kDion3, kDion5},
                  "steps 1, 2, 3, 5 of polar_express_dion",
                  kOvershooting,
                  kOvershooting,
                  true});
  sets.push_back({"polar_express_dion3",
                  {kDion1, kDion3, kDion5},
                  "steps 1, 3, 5 of polar_express_dion",
                  kOvershooting,
                  kOvershooting,
                  true});
  // Nobody has shown cubic steps stable in Gram form with fp16 products, so they do not claim it.
  sets.push_back({"cubic5",
                  {{3.3656576, -3.3420992, 0},
                   {2.5744352, -1.4957376, 0},
                   {2.5368962, -1.4312570, 0},
                   {2.4418906, -1.2764040, 0},
                   {2.2230472, -0.9630650, 0}},
                  "cubic steps (c = 0)",
                  0.65,
                  kSettled,
                  false});
  // Eight steps after the restart amplify rounding in the null directions beyond fp32: not safe.
  sets.push_back({"deepseek_v4", DeepSeekV4(), "DeepSeek-V4: simple x 8, then (2, -1.5, .5) x 2",
                  0.51, kSettled, false});
  return sets;
}

bool SameSteps(std::span<const NewtonSchulzStep> left, std::span<const NewtonSchulzStep> right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                    [](const NewtonSchulzStep& x, const NewtonSchulzStep& y) {
                      return x.a == y.a && x.b == y.b && x.c == y.c;
                    });
}

}  // namespace

std::span<const CoefficientSet> CoefficientSets() {
  // Never destroyed: a backend may still run while static objects are torn down.
  static const auto& sets = *new std::vector<CoefficientSet>(MakeSets());
  return sets;
}

const CoefficientSet* FindCoefficientSet(std::string_view name) {
  for (const CoefficientSet& set : CoefficientSets()) {
    if (set.name == name) return &set;
  }
  return nullptr;
}

bool IsGramSafe(std::span<const NewtonSchulzStep> steps) {
  for (const CoefficientSet& set : CoefficientSets()) {
    if (set.gram_safe && SameSteps(set.steps, steps)) return true;
  }
  return false;
}

double EvaluateSteps(std::span<const NewtonSchulzStep> steps, double x) {
  for (const NewtonSchulzStep& step : steps) {
    const double square = x * x;
    x *= step.a + square * (step.b + step.c * square);
  }
  return x;
}

bool IsPlausibleNorm(double sum_squares, std::int64_t min_side, double residual_max) {
  return sum_squares <= static_cast<double>(min_side) * (1.0 + residual_max);
}

}  // namespace muond::kernels
