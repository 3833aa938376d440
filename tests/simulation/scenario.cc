#include "tests/simulation/scenario.h"

#include <algorithm>
#include <cmath>

#include "server/step/loss_scaler.h"

namespace muond::simulation {
namespace {

// What a hash is for, so that no two uses see the same one.
enum Purpose : std::uint64_t {
  kScale,
  kHyperparameters,
  kSkip,
  kAbsent,
  kValue,
  kStepOverflow,
  kBlockOverflow,
  kStateOverflow,
  kInitial,
  kDigest,
  kGrow
};

constexpr Time kSecond = 1'000'000;

void DrawSpec(Random& random, RunSpec& spec) {
  GroupSpec group;
  group.name = "g";
  spec.groups.push_back(group);
  LossScaleSpec& scale = spec.loss_scale;
  scale.mode = random.Pick<LossScaleMode>({LossScaleMode::kNone, LossScaleMode::kStatic,
                                           LossScaleMode::kDynamic, LossScaleMode::kDynamic,
                                           LossScaleMode::kExternal});
  if (scale.mode == LossScaleMode::kStatic) scale.initial = 1024;
  if (scale.mode == LossScaleMode::kDynamic) {
    scale.policy = random.Pick<LossScalePolicy>(
        {LossScalePolicy::kTorch, LossScalePolicy::kDeepSpeed, LossScalePolicy::kMegatron});
    scale.window = random.Between(1, 3);
    // So low that a few overflows reach the minimum.
    scale.initial = random.Pick<double>({4, 65536});
    scale.minimum = 1;
    scale.error_after = random.Pick<std::int64_t>({0, 1});
  }
  const double unit = 1 / LossScaler(scale).scale();
  if (random.Chance(0.5)) spec.max_grad_norm = 1500 * unit;
  if (random.Chance(0.3)) spec.grad_norm_skip_threshold = 4000 * unit;
  spec.reduce_ranks = random.Pick<Reduction>({Reduction::kMean, Reduction::kSum});
  spec.reduce_micro_batches = random.Pick<Reduction>({Reduction::kMean, Reduction::kSum});
}

void DrawFaults(Random& random, int nodes, Faults& faults) {
  faults.heals = random.Between(1, 4) * kSecond;
  for (int node = 0; node < nodes; ++node) {
    faults.speeds.push_back(random.Chance(0.15) ? 10 : 1);
  }
  // A few scenarios without any, so that the plain course of things is there, too.
  if (random.Chance(0.05)) return;
  // Each kind of fault is left out of half of the scenarios: alone, some show more.
  const auto rate = [&](double most) {
    return random.Chance(0.5) ? 0.0 : most * static_cast<double>(random.Between(1, 10)) / 10;
  };
  faults.drop = rate(0.2);
  faults.duplicate = rate(0.2);
  faults.slow = rate(0.2);
  faults.slowest = random.Pick<Time>({50'000, 300'000, 1'500'000});
  faults.partitions = rate(3);
  faults.pauses = rate(3);
  faults.trainer_crashes = rate(3);
  faults.daemon_crashes = rate(1);
  faults.raises = rate(6);
  faults.engine_failure = rate(0.01);
  faults.loses_gradients = random.Pick<double>({0, 0.5, 1});
  faults.cancel = rate(0.1);
  faults.lie = rate(0.1);
}

// Half of the scenarios grow, by the last parameters whose ties begin among them.
void DrawGrowth(Scenario& scenario) {
  const std::uint64_t hash = Hash(scenario.seed, kGrow);
  const auto& parameters = scenario.model.parameters;
  int late = static_cast<int>(parameters.size());
  const int wanted = 1 + static_cast<int>(hash / 2 % 3);
  for (int p = late - 1; p > 0 && late > static_cast<int>(parameters.size()) - wanted; --p) {
    const bool own = std::all_of(parameters.begin() + p, parameters.end(),
                                 [p](const ModelParameter& one) { return one.state >= p; });
    if (own) late = p;
  }
  if (hash % 2 == 0 || late == static_cast<int>(parameters.size())) return;
  scenario.late = late;
  scenario.grows_at = 1 + static_cast<std::int64_t>(hash / 8 % (scenario.steps - 1));
}

}  // namespace

double Scenario::LossScale(std::int64_t lineage, std::int64_t step, double told) const {
  if (spec.loss_scale.mode != LossScaleMode::kExternal) return told;
  return std::ldexp(1.0, static_cast<int>(Hash(seed, kScale, lineage, step) % 16));
}

StepBegin Scenario::BeginOf(std::int64_t lineage, std::int64_t step, double told) const {
  StepBegin begin;
  begin.step = step;
  begin.loss_scale = LossScale(lineage, step, told);
  const std::uint64_t hash = Hash(seed, kHyperparameters, lineage, step);
  begin.micro_batches = 1 + static_cast<std::int64_t>(hash % 5 == 0);
  // Most steps leave the hyperparameters at their last values.
  if (hash % 3 == 0) {
    begin.muon["g"].lr = static_cast<double>(hash % 1000) / 1000;
    begin.adamw["g"].lr = static_cast<double>(hash % 999) / 1000;
  }
  return begin;
}

std::optional<SkipCause> Scenario::SkipOf(std::int64_t lineage, std::int64_t step) const {
  const std::uint64_t hash = Hash(seed, kSkip, lineage, step);
  if (!Happens(hash, trainer_skip)) return std::nullopt;
  return hash % 2 == 0 ? SkipCause::kTrainer : SkipCause::kOverflow;
}

bool Scenario::Absent(int p, std::int64_t rank, std::int64_t step, const Content& content) const {
  if (Late(p) && step < grows_at) return true;
  // Sliced: on all ranks alike, whatever they lost. Replicated: each as it likes.
  const bool alike = !model.parameters[p].replicated;
  return Happens(Hash(seed, kAbsent, content.lineage, step, p, alike ? 0 : rank + 1,
                      alike ? 0 : content.number),
                 absent);
}

std::vector<std::string> Scenario::AbsentOf(std::int64_t rank, std::int64_t step,
                                            const Content& content, bool grown) const {
  std::vector<std::string> names;
  for (std::size_t p = 0; p < model.parameters.size(); ++p) {
    if (Late(static_cast<int>(p)) && !grown) continue;
    if (Absent(static_cast<int>(p), rank, step, content)) {
      names.push_back(model.parameters[p].name);
    }
  }
  return names;
}

GradientBlock Scenario::Gradient(const SliceId& id, std::int64_t step, const Content& content,
                                 int block) const {
  const std::uint64_t hash = Hash(seed, kValue, content.lineage, content.number, step, id.parameter,
                                  id.rank, id.slice, id.micro_batch, block);
  const bool overflows = Happens(Hash(seed, kStepOverflow, content.lineage, step), overflow);
  return {static_cast<std::int64_t>(hash % 2001) - 1000,
          !overflows || !Happens(Hash(hash, kBlockOverflow), 0.1)};
}

bool Scenario::OverflowsState(std::int64_t step, int state, int block, std::int64_t sum) const {
  return Happens(Hash(seed, kStateOverflow, step, state, block, sum), state_overflow);
}

std::uint64_t Scenario::InitialState(std::int64_t lineage, int state, int block) const {
  return Hash(seed, kInitial, lineage, state, block);
}

std::uint64_t DigestOf(const SliceId& id, const Content& content) {
  return Hash(kDigest, content.lineage, content.number, id.parameter, id.rank, id.slice,
              id.micro_batch);
}

Scenario MakeScenario(std::uint64_t seed) {
  Random random(Hash(seed));
  Scenario scenario;
  scenario.seed = seed;
  const int world_size = static_cast<int>(random.Between(1, 4));
  const int daemons = static_cast<int>(random.Between(1, 5));
  const Planning planning = random.Chance(0.3) ? Planning::kPlan : Planning::kRandom;
  scenario.model = MakeModel(random, world_size, daemons, planning);
  DrawSpec(random, scenario.spec);
  scenario.steps = random.Between(3, 8);
  scenario.any_daemon_raises = random.Chance(0.5);
  scenario.eager = random.Chance(0.5);
  scenario.engine_slowest = random.Pick<Time>({3'000, 3'000, 100'000});
  scenario.overflow = random.Pick<double>({0, 0.3});
  scenario.state_overflow = random.Pick<double>({0, 0.02});
  scenario.trainer_skip = random.Pick<double>({0, 0.2});
  scenario.absent = random.Pick<double>({0, 0.2});
  DrawFaults(random, daemons + world_size, scenario.faults);
  DrawGrowth(scenario);
  return scenario;
}

}  // namespace muond::simulation
