#include "server/engine/adamw_sample.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

constexpr std::int64_t kAlignment = 64;  // elements

absl::Status KernelError(const kernels::Error& error) {
  return absl::InternalError(absl::StrFormat("sample AdamW: %s", error.message()));
}

}  // namespace

AdamWSample::AdamWSample(Engine& engine, const CommitRequest& request,
                         const std::vector<int>& states)
    : engine_(engine), request_(request), states_(states) {}

// A device has scratch enough from its creation on (kDeviceScratchBytes); the host can get some.
absl::Status AdamWSample::LayOut() {
  const auto count = static_cast<std::int64_t>(states_.size());
  const std::int64_t each =
      std::max<std::int64_t>(kSampleElements / std::max<std::int64_t>(count, 1) / kAlignment, 1) *
      kAlignment;
  std::int64_t total = 0;
  for (const int index : states_) {
    const ShardState& state = engine_.states_[index];
    const std::int64_t elements = std::min(each, state.elements);
    if (total + each > kSampleElements && total > 0) break;
    pieces_.push_back({&state, nullptr, static_cast<std::size_t>(elements)});
    total += (elements + kAlignment - 1) / kAlignment * kAlignment;
  }
  const std::size_t bytes = static_cast<std::size_t>(total) * 2 * sizeof(float);
  Buffer* memory = &engine_.scratch_;
  if (memory->bytes() < bytes) {
    memory_ = Buffer(engine_.backend_, bytes);
    memory = &memory_;
  }
  if (!memory->ok()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("sample AdamW: no memory for %d bytes", bytes));
  }
  float* at = memory->floats();
  iterates_ = reinterpret_cast<char*>(at + total);
  for (Piece& piece : pieces_) {
    piece.copy = at;
    at += (static_cast<std::int64_t>(piece.elements) + kAlignment - 1) / kAlignment * kAlignment;
  }
  return absl::OkStatus();
}

absl::Status AdamWSample::Before() {
  MUOND_RETURN_IF_ERROR(LayOut());
  std::vector<kernels::CopyJob> copies;
  std::vector<kernels::StateView> views;
  for (const Piece& piece : pieces_) {
    copies.push_back({piece.copy, piece.state->weight, piece.elements * sizeof(float)});
    views.push_back({piece.copy, piece.elements});
  }
  before_.resize(views.size());
  if (auto error = engine_.backend_.Copy(copies)) return KernelError(error);
  if (auto error = engine_.backend_.ScanState(views, before_)) return KernelError(error);
  return absl::OkStatus();
}

// The update is W' - decay W. A momentum of the form beta M + G with beta = -decay, M = W and
// G = W' is just that, and comes with its sum of squares.
absl::Status AdamWSample::After(CommitReport& report) {
  std::vector<kernels::MomentumJob> jobs;
  for (const Piece& piece : pieces_) {
    const Hyperparameters& now = request_.adamw.at(piece.state->group->name);
    jobs.push_back({.gradient = {.data = piece.state->weight, .elements = piece.elements},
                    .rule = {.form = kernels::MomentumForm::kSum,
                             .beta = -(1.0 - now.lr * now.weight_decay),
                             .nesterov = false},
                    .m = piece.copy,
                    .u = iterates_ + (piece.copy - pieces_[0].copy) * sizeof(float)});
  }
  std::vector<kernels::StateScan> updates(jobs.size());
  if (auto error = engine_.backend_.Momentum(jobs, updates)) return KernelError(error);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const double ratio = std::sqrt(updates[i].sum_squares / before_[i].sum_squares);
    if (!std::isfinite(ratio)) continue;
    const ShardState& state = *pieces_[i].state;
    report.diagnostics.groups[state.group->name].update_ratios.push_back(ratio);
    Enter(report.diagnostics.update_ratios, ratio, state.parameter);
  }
  return absl::OkStatus();
}

}  // namespace muond
