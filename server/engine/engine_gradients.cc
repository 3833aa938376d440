// Gradients of the step in flight: to where the backend can read them, summed, scanned.
#include <algorithm>
#include <numeric>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/engine/engine.h"

namespace muond {
namespace {

absl::Status FromKernel(const ShardState& state, const char* what, const kernels::Error& error) {
  return absl::InternalError(
      absl::StrFormat("parameter \"%s\": %s: %s", state.spec->name, what, error.message()));
}

// The shard's first element in a packed tensor.
const void* ShardOf(const GradientLayer& layer, const ShardState& state) {
  return static_cast<const char*>(layer.memory->data()) + state.packed * DtypeBytes(layer.dtype);
}

}  // namespace

absl::StatusOr<std::vector<ReducedGradient>> Engine::Reduce(
    std::span<const ReduceRequest> requests) {
  MUOND_RETURN_IF_ERROR(BringGradients(requests));
  std::vector<kernels::GradientView> gradients;
  for (const ReduceRequest& request : requests) {
    for (const ShardState& state : ShardsOf(request.state)) gradients.push_back(state.gradient);
  }
  std::vector<kernels::GradientScan> scans(gradients.size());
  if (auto error = backend_.Scan(gradients, scans)) {
    return absl::InternalError(absl::StrFormat("scan gradients: %s", error.message()));
  }
  std::vector<ReducedGradient> results(requests.size());
  auto scan = scans.begin();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    ReducedGradient& result = results[i];
    result.layers_free = true;
    for (ShardState& state : ShardsOf(requests[i].state)) {
      state.reduced = true;
      state.orthogonalized = false;
      state.gradient_max = scan->max_abs;
      state.gradient_sum_squares =
          std::accumulate(scan->block_sums.begin(), scan->block_sums.end(), 0.0);
      result.nonfinite += static_cast<std::int64_t>(scan->nonfinite);
      result.max_abs = std::max(result.max_abs, scan->max_abs);
      result.block_sums.insert(result.block_sums.end(), scan->block_sums.begin(),
                               scan->block_sums.end());
      result.state_overflow =
          result.state_overflow || (scan->nonfinite == 0 && CouldOverflow(state, scan->max_abs));
      result.layers_free = result.layers_free && state.gradient_layer == nullptr;
      doomed_ = doomed_ || scan->nonfinite > 0 || result.state_overflow;
      ++scan;
    }
  }
  return results;
}

// Every gradient to where it can be read: in place, on the device, or as a sum.
absl::Status Engine::BringGradients(std::span<const ReduceRequest> requests) {
  UploadPack pack(backend_, pack_, scratch_);
  for (const ReduceRequest& request : requests) {
    MUOND_CHECK(!request.layers.empty(), "a reduction without layers");
    for (ShardState& state : ShardsOf(request.state)) {
      MUOND_RETURN_IF_ERROR(BringGradient(state, request, pack));
    }
  }
  if (auto error = pack.Flush()) {
    return absl::InternalError(absl::StrFormat("upload gradients: %s", error.message()));
  }
  return absl::OkStatus();
}

absl::Status Engine::BringGradient(ShardState& state, const ReduceRequest& request,
                                   UploadPack& pack) {
  faults_.StopHere(FaultPoint::kStopInReduce);
  if (faults_.Fire(FaultPoint::kFailReduce)) {
    return absl::InternalError(
        absl::StrFormat("parameter \"%s\": reduce gradient: injected fault", state.spec->name));
  }
  state.gradient = {.elements = static_cast<std::size_t>(state.elements),
                    .unscale = static_cast<float>(1.0 / request.divisor)};
  state.gradient_layer.reset();
  const GradientLayer& first = request.layers[0];
  if (request.layers.size() > 1) {
    MUOND_RETURN_IF_ERROR(SumLayers(state, request.layers));
    state.gradient.data = state.gradient_memory;
    return absl::OkStatus();
  }
  state.gradient.dtype = first.dtype;
  const bool here =
      first.memory->place() == StagingPlace::kBackend && first.memory->backend() == &backend_;
  if (backend_.host_memory() || here) {
    // Read where it lies, in the trainer's dtype.
    state.gradient_layer = first.memory;
    state.gradient.data = ShardOf(first, state);
    return absl::OkStatus();
  }
  state.gradient.data = state.gradient_memory;
  if (auto error = pack.Add(state.gradient_memory, ShardOf(first, state),
                            state.gradient.elements * DtypeBytes(first.dtype))) {
    return FromKernel(state, "upload gradient", error);
  }
  return absl::OkStatus();
}

absl::Status Engine::CopyGradient(int state, char* out) const {
  for (const ShardState& shard : ShardsOf(state)) {
    const std::size_t bytes = DtypeBytes(shard.gradient.dtype);
    if (!shard.reduced) {
      return absl::InternalError(
          absl::StrFormat("parameter \"%s\": copy gradient: none is reduced", shard.spec->name));
    }
    if (auto error = backend_.Download(out + shard.packed * bytes, shard.gradient.data,
                                       shard.gradient.elements * bytes)) {
      return FromKernel(shard, "copy gradient", error);
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::SumLayers(ShardState& state, const std::vector<GradientLayer>& layers) {
  if (state.gradient_memory == nullptr) {
    const std::size_t bytes = state.gradient.elements * sizeof(float);
    state.gradient_sum = Buffer(backend_, bytes);
    if (!state.gradient_sum.ok()) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "parameter \"%s\": sum gradient: no memory for %d bytes", state.spec->name, bytes));
    }
    state.gradient_memory = state.gradient_sum.floats();
    scratch_bytes_ += static_cast<std::int64_t>(bytes);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (auto error = backend_.Accumulate(state.gradient_memory, ShardOf(layers[i], state),
                                         layers[i].dtype, state.gradient.elements, i == 0)) {
      return FromKernel(state, "sum gradient", error);
    }
  }
  return absl::OkStatus();
}

}  // namespace muond
