#include "tests/simulation/toy_engine.h"

#include <limits>
#include <utility>

#include "absl/strings/str_format.h"

namespace muond::simulation {

ToyEngine::ToyEngine(const Scenario& scenario, int daemon, std::int64_t lineage)
    : scenario_(scenario), daemon_(daemon) {
  for (std::size_t p = 0; p < scenario.model.parameters.size(); ++p) {
    std::vector<std::uint64_t>& blocks = state_.emplace_back();
    if (!scenario.model.IsState(static_cast<int>(p))) continue;
    for (int block = 0; block < scenario.model.parameters[p].blocks; ++block) {
      blocks.push_back(scenario.InitialState(lineage, static_cast<int>(p), block));
    }
  }
}

bool ToyEngine::Owns(int state, int block) const {
  return daemon_ < 0 || scenario_.model.owners[state][block] == daemon_;
}

void ToyEngine::Discard() {
  staged_.clear();
  reduced_.clear();
}

absl::Status ToyEngine::Add(const Layer& layer, std::int64_t step, int block, std::int64_t& sum,
                            bool& finite) const {
  const ModelParameter& parameter = scenario_.model.parameters[layer.parameter];
  int covered = 0;
  for (std::size_t rank = 0; rank < parameter.slices.size(); ++rank) {
    if (layer.rank >= 0 && layer.rank != static_cast<std::int64_t>(rank)) continue;
    for (std::size_t slice = 0; slice < parameter.slices[rank].size(); ++slice) {
      if (!parameter.slices[rank][slice].Holds(block)) continue;
      const SliceId id{layer.parameter, static_cast<std::int64_t>(rank),
                       static_cast<std::int64_t>(slice), layer.micro_batch};
      const auto staged = staged_.find(id);
      if (staged == staged_.end()) {
        return absl::InternalError(
            absl::StrFormat("parameter \"%s\": reduce for step %d: slice %d of rank %d is not here",
                            parameter.name, step, slice, rank));
      }
      const GradientBlock value = scenario_.Gradient(id, step, staged->second, block);
      sum += value.value;
      finite = finite && value.finite;
      ++covered;
    }
  }
  if (covered == 1) return absl::OkStatus();
  return absl::InternalError(
      absl::StrFormat("parameter \"%s\": reduce for step %d: block %d is covered %d times",
                      parameter.name, step, block, covered));
}

absl::StatusOr<GradientFacts> ToyEngine::Reduce(const ReduceEffect& effect, std::int64_t step) {
  GradientFacts facts;
  Reduced& reduced = reduced_[effect.state];
  reduced.divisor = effect.divisor;
  reduced.sums.assign(scenario_.model.parameters[effect.state].blocks, 0);
  for (std::size_t i = 0; i < reduced.sums.size(); ++i) {
    const int block = static_cast<int>(i);
    if (!Owns(effect.state, block)) continue;
    bool finite = true;
    for (const Layer& layer : effect.layers) {
      absl::Status added = Add(layer, step, block, reduced.sums[i], finite);
      if (!added.ok()) return added;
    }
    const double value = static_cast<double>(reduced.sums[i]) / effect.divisor;
    facts.nonfinite += finite ? 0 : 1;
    facts.block_sums.push_back(finite ? value * value : std::numeric_limits<double>::quiet_NaN());
    if (scenario_.OverflowsState(step, effect.state, block, reduced.sums[i])) {
      facts.state_overflow = true;
    }
  }
  return facts;
}

void ToyEngine::Commit(const CommitEffect& effect) {
  const Hyperparameters& muon = effect.muon.at("g");
  const Hyperparameters& adamw = effect.adamw.at("g");
  for (const auto& [p, reduced] : reduced_) {
    if (effect.absent.contains(p)) continue;
    for (std::size_t block = 0; block < state_[p].size(); ++block) {
      if (!Owns(p, static_cast<int>(block))) continue;
      std::uint64_t& state = state_[p][block];
      state = Hash(state, reduced.sums[block], Bits(reduced.divisor), Bits(effect.clip_coefficient),
                   Bits(muon.lr), Bits(adamw.lr));
    }
  }
  last_commit_ = effect;
  last_reduced_ = reduced_;
}

void ToyEngine::CommitAgain() {
  std::swap(reduced_, last_reduced_);
  Commit(CommitEffect(last_commit_));
}

void ToyEngine::Touch() {
  for (auto& blocks : state_) {
    for (std::uint64_t& state : blocks) state = Mix(state);
  }
}

}  // namespace muond::simulation
