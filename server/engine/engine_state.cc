// Whole state out and in again, for checkpoints.
#include <memory>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/engine.h"

namespace muond {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t BytesOf(const ShardState& state, const ShardState::Tensor& tensor) {
  return state.elements * static_cast<std::int64_t>(DtypeBytes(tensor.dtype));
}

}  // namespace

std::vector<ShardState::Tensor> ShardState::Tensors() const {
  if (muon()) {
    return {{"master", weight, Dtype::kF32}, {"momentum", momentum, momentum_dtype()}};
  }
  return {{"exp_avg", momentum, Dtype::kF32},
          {"exp_avg_sq", exp_avg_sq, Dtype::kF32},
          {"master", weight, Dtype::kF32}};
}

StateCopy Engine::MakeStateCopy() const {
  StateCopy copy{.bytes = state_bytes_};
  std::int64_t size = kAlignment;
  for (const ShardState& state : states_) {
    StateCopy::Shard shard{
        .parameter = state.parameter, .first = state.first, .elements = state.elements};
    for (const ShardState::Tensor& tensor : state.Tensors()) {
      const std::int64_t bytes = BytesOf(state, tensor);
      shard.tensors.push_back({tensor.name, tensor.dtype, nullptr, bytes});
      size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    copy.shards.push_back(std::move(shard));
  }
  // Not zeroed: it is written before it is read, and nobody waits for a second pass.
  copy.memory = std::make_unique_for_overwrite<std::byte[]>(size);
  void* at = copy.memory.get();
  auto left = static_cast<std::size_t>(size);
  for (StateCopy::Shard& shard : copy.shards) {
    for (StateCopy::Tensor& tensor : shard.tensors) {
      std::align(kAlignment, tensor.bytes, at, left);
      tensor.data = static_cast<std::byte*>(at);
      at = tensor.data + tensor.bytes;
      left -= tensor.bytes;
    }
  }
  return copy;
}

absl::Status Engine::CopyState(StateCopy& copy) const {
  MUOND_CHECK(copy.shards.size() == states_.size(), "a copy that was made for this engine");
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const ShardState& state = states_[i];
    copy.shards[i].t = state.t;
    const auto tensors = state.Tensors();
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      const StateCopy::Tensor& to = copy.shards[i].tensors[j];
      if (auto error = backend_.Download(to.data, tensors[j].data, to.bytes)) {
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
    const auto tensors = state.Tensors();
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      const StateCopy::Tensor& from = copy.shards[i].tensors[j];
      MUOND_CHECK(from.dtype == tensors[j].dtype, "a copy that was made for this engine");
      if (auto error = backend_.Upload(tensors[j].data, from.data, from.bytes)) {
        return absl::InternalError(absl::StrFormat("parameter \"%s\": restore: %s",
                                                   state.spec->name, error.message()));
      }
      views.push_back(
          {tensors[j].data, static_cast<std::size_t>(state.elements), tensors[j].dtype});
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
