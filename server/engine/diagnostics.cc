#include "server/engine/diagnostics.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace muond {
namespace {

// Of a sum of squares whose elements were rounded once, with a margin.
double RelativeError(kernels::Dtype dtype) {
  return dtype == kernels::Dtype::kBF16 ? 0x1p16 * 1e-7 : 1e-7;
}
// A cosine that may be off by more than this is not worth a histogram's bucket.
constexpr double kCosineErrorMax = 0.05;

void Append(const std::vector<double>& part, std::vector<double>& whole) {
  whole.insert(whole.end(), part.begin(), part.end());
}

void Merge(const RemarkableList& part, RemarkableList& whole) {
  for (const Remarkable& entry : part) Enter(whole, entry.value, entry.parameter);
}

}  // namespace

PhaseSpan SpanUntilNow(const char* phase, int device, double seconds) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return {.phase = phase, .device = device, .start_seconds = now - seconds, .seconds = seconds};
}

void Enter(RemarkableList& list, double value, int parameter) {
  if (!std::isfinite(value)) return;
  const auto same = std::find_if(list.begin(), list.end(),
                                 [&](const Remarkable& e) { return e.parameter == parameter; });
  if (same != list.end()) {
    if (same->value >= value) return;
    list.erase(same);
  } else if (list.size() == kRemarkableMax) {
    if (list.back().value >= value) return;
    list.pop_back();
  }
  const auto place = std::find_if(list.begin(), list.end(),
                                  [&](const Remarkable& entry) { return entry.value < value; });
  list.insert(place, {value, parameter});
}

void Merge(const CommitDiagnostics& part, CommitDiagnostics& whole) {
  for (const auto& [name, group] : part.groups) {
    CommitDiagnostics::Group& sum = whole.groups[name];
    Append(group.cosines, sum.cosines);
    Append(group.update_ratios, sum.update_ratios);
    Append(group.residuals, sum.residuals);
  }
  Merge(part.residuals, whole.residuals);
  Merge(part.update_ratios, whole.update_ratios);
  Merge(part.gradient_norms, whole.gradient_norms);
  whole.stale += part.stale;
  whole.sampled = whole.sampled || part.sampled;
  if (whole.left_out.empty()) whole.left_out = part.left_out;
  whole.spans.insert(whole.spans.end(), part.spans.begin(), part.spans.end());
}

std::optional<double> MomentumCosine(const MomentumSums& sums) {
  const double norms = std::sqrt(sums.before) * std::sqrt(sums.gradient);
  const double scale = 2 * sums.a * sums.b * norms;
  if (!(std::abs(scale) > 0) || !std::isfinite(scale) || !std::isfinite(sums.after)) {
    return std::nullopt;
  }
  const double left = sums.a * sums.a * sums.before;
  const double right = sums.b * sums.b * sums.gradient;
  if (RelativeError(sums.dtype) * (sums.after + left + right) > kCosineErrorMax * std::abs(scale)) {
    return std::nullopt;
  }
  return std::clamp((sums.after - left - right) / scale, -1.0, 1.0);
}

std::optional<double> Residual(const ResidualSums& sums) {
  const double squares = sums.output * sums.output;  // sum of s^2, s those of O
  const double fourth_of_x =
      (sums.plus * sums.plus - sums.minus * sums.minus) / (4 * sums.t);  // sum of s^4 of X
  const double residual_squares =
      (fourth_of_x * squares * squares - 2 * squares + sums.k) / sums.k;
  if (squares == 0 || !std::isfinite(residual_squares)) return std::nullopt;
  return std::sqrt(std::max(residual_squares, 0.0));
}

}  // namespace muond
