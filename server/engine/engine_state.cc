// Whole state out and in again, for checkpoints.
#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/engine.h"

namespace muond {
namespace {

// By name.
std::vector<std::pair<const char*, float*>> TensorsOf(const ShardState& state) {
  if (state.muon()) return {{"master", state.weight}, {"momentum", state.momentum}};
  return {{"exp_avg", state.momentum}, {"exp_avg_sq", state.exp_avg_sq}, {"master", state.weight}};
}

}  // namespace

StateCopy Engine::MakeStateCopy() const {
  StateCopy copy{.bytes = state_bytes_};
  // Not zeroed: it is written before it is read, and nobody waits for a second pass.
  copy.memory = std::make_unique_for_overwrite<float[]>(state_bytes_ / sizeof(float));
  float* at = copy.memory.get();
  for (const ShardState& state : states_) {
    StateCopy::Shard shard{
        .parameter = state.parameter, .first = state.first, .elements = state.elements};
    for (const auto& [name, tensor] : TensorsOf(state)) {
      shard.tensors.push_back({name, at});
      at += state.elements;
    }
    copy.shards.push_back(std::move(shard));
  }
  return copy;
}

absl::Status Engine::CopyState(StateCopy& copy) const {
  MUOND_CHECK(copy.shards.size() == states_.size(), "a copy that was made for this engine");
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const ShardState& state = states_[i];
    copy.shards[i].t = state.t;
    const auto tensors = TensorsOf(state);
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      if (auto error = backend_.Download(copy.shards[i].tensors[j].data, tensors[j].second,
                                         state.elements * sizeof(float))) {
        return absl::InternalError(absl::StrFormat("parameter \"%s\": copy for a checkpoint: %s",
                                                   state.spec->name, error.message()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::RestoreState(const StateCopy& copy) {
  MUOND_CHECK(copy.shards.size() == states_.size(), "a copy that was made for this engine");
  std::vector<kernels::StateView> views;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    ShardState& state = states_[i];
    state.t = copy.shards[i].t;
    state.initialized = {};
    const auto tensors = TensorsOf(state);
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      if (auto error = backend_.Upload(tensors[j].second, copy.shards[i].tensors[j].data,
                                       state.elements * sizeof(float))) {
        return absl::InternalError(absl::StrFormat("parameter \"%s\": restore: %s",
                                                   state.spec->name, error.message()));
      }
      views.push_back({tensors[j].second, static_cast<std::size_t>(state.elements)});
    }
  }
  // What the last commit knew of the state, the next one must know.
  std::vector<kernels::StateScan> scans(views.size());
  if (auto error = backend_.ScanState(views, scans)) {
    return absl::InternalError(absl::StrFormat("restore: scan: %s", error.message()));
  }
  auto scan = scans.begin();
  for (ShardState& state : states_) {
    if (!state.muon()) {
      state.momentum_scan = *scan++;
      state.exp_avg_sq_scan = *scan++;
      state.weight_scan = *scan++;
    } else {
      state.weight_scan = *scan++;
      state.momentum_scan = *scan++;
    }
  }
  return absl::OkStatus();
}

}  // namespace muond
