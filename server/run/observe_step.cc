#include "server/run/observe_step.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

double UnixSeconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

std::vector<double> ValuesOf(const RemarkableList& list) {
  std::vector<double> values;
  for (const Remarkable& entry : list) values.push_back(entry.value);
  return values;
}

}  // namespace

StepObserver::StepObserver(const RunSpec& spec, const ObserveOptions& options,
                           RunMetrics* run_metrics, DaemonMetrics* metrics)
    : spec_(&spec), options_(options), run_metrics_(run_metrics), metrics_(metrics) {}

StepObserver::~StepObserver() {
  if (options_.events != nullptr) options_.events->Forget(spec().name);
}

bool StepObserver::Samples(std::int64_t step) const {
  return options_.diagnostics_every > 0 && step % options_.diagnostics_every == 0;
}

void StepObserver::OnBegin(absl::Time now) {
  MutexLock lock(mutex_);
  if (event_.begin_seconds == 0) event_.begin_seconds = UnixSeconds(now);
}

void StepObserver::OnReduced(const ReducedGradient& result) {
  if (result.seconds <= 0) return;
  metrics_->ObservePhase(StepPhase::kReduce, absl::Seconds(result.seconds));
  run_metrics_->AddBusySeconds(result.seconds);
  MutexLock lock(mutex_);
  event_.phases.push_back(SpanUntilNow("reduce", result.device, result.seconds));
}

void StepObserver::OnVote(absl::Time now) {
  MutexLock lock(mutex_);
  if (voted_ != absl::InfinitePast()) return;
  voted_ = now;
  if (event_.begin_seconds == 0) return;
  const double start = event_.begin_seconds;
  event_.phases.push_back({.phase = "receive",
                           .device = -1,
                           .start_seconds = start,
                           .seconds = std::max(0.0, UnixSeconds(now) - start)});
}

void StepObserver::OnVerdict(absl::Time now) {
  MutexLock lock(mutex_);
  if (voted_ == absl::InfinitePast()) return;
  event_.phases.push_back({.phase = "vote",
                           .device = -1,
                           .start_seconds = UnixSeconds(voted_),
                           .seconds = std::max(0.0, absl::ToDoubleSeconds(now - voted_))});
}

void StepObserver::OnCommitted(const CommitReport& report) {
  const CommitDiagnostics& diagnostics = report.diagnostics;
  Publish(diagnostics);
  if (!diagnostics.left_out.empty()) {
    spdlog::warn("run \"{}\": diagnostics left out: {}", spec().name, diagnostics.left_out);
  }
  const std::pair<StepPhase, double> phases[] = {
      {StepPhase::kMomentum, report.momentum_seconds},
      {StepPhase::kNewtonSchulz, report.newton_schulz_seconds},
      {StepPhase::kApply, report.apply_seconds},
      {StepPhase::kAdamW, report.adamw_seconds}};
  for (const auto& [phase, seconds] : phases) {
    if (seconds > 0) metrics_->ObservePhase(phase, absl::Seconds(seconds));
  }
  for (const PhaseSpan& span : diagnostics.spans) run_metrics_->AddBusySeconds(span.seconds);
  MutexLock lock(mutex_);
  event_.phases.insert(event_.phases.end(), diagnostics.spans.begin(), diagnostics.spans.end());
  event_.sampled = diagnostics.sampled;
  event_.worst_residuals = Named(diagnostics.residuals);
  event_.worst_update_ratios = Named(diagnostics.update_ratios);
  event_.largest_gradients = Named(diagnostics.gradient_norms);
  event_.stale_tensors = diagnostics.stale;
  if (!diagnostics.residuals.empty()) worst_residual_ = diagnostics.residuals[0].value;
}

void StepObserver::Publish(const CommitDiagnostics& diagnostics) {
  for (std::size_t i = 0; i < spec().groups.size(); ++i) {
    const auto found = diagnostics.groups.find(spec().groups[i].name);
    if (found == diagnostics.groups.end()) continue;
    run_metrics_->ObserveMeasures(static_cast<int>(i),
                                  {.cosines = found->second.cosines,
                                   .update_ratios = found->second.update_ratios,
                                   .residuals = found->second.residuals});
  }
  using enum RunMetrics::Measure;
  run_metrics_->SetWorst(kResidual, ValuesOf(diagnostics.residuals));
  run_metrics_->SetWorst(kUpdateRatio, ValuesOf(diagnostics.update_ratios));
  run_metrics_->SetWorst(kGradNorm, ValuesOf(diagnostics.gradient_norms));
  run_metrics_->SetStaleTensors(diagnostics.stale);
}

std::vector<NamedValue> StepObserver::Named(const RemarkableList& list) const {
  std::vector<NamedValue> named;
  for (const Remarkable& entry : list) {
    named.push_back({spec().parameters[entry.parameter].name, entry.value});
  }
  return named;
}

void StepObserver::OnOutcome(const StepOutcome& outcome, RunMetrics::ScaleMove move,
                             absl::Time now, const HyperparametersByGroup& muon,
                             const HyperparametersByGroup& adamw) {
  MutexLock lock(mutex_);
  StepEvent event = std::exchange(event_, {});
  voted_ = absl::InfinitePast();
  event.run = spec().name;
  event.daemon = options_.daemon;
  event.outcome = outcome;
  event.end_seconds = UnixSeconds(now);
  event.scale_change = move == RunMetrics::ScaleMove::kGrowth    ? 1
                       : move == RunMetrics::ScaleMove::kBackoff ? -1
                                                                 : 0;
  for (const GroupSpec& group : spec().groups) {
    const auto& values = group.algorithm == Algorithm::kAdamW ? adamw : muon;
    event.learning_rates[group.name] = values.at(group.name).lr;
  }
  Summarize(event);
  if (options_.events != nullptr) options_.events->Publish(std::move(event));
}

void StepObserver::OnAbandoned() {
  MutexLock lock(mutex_);
  event_ = {};
  voted_ = absl::InfinitePast();
}

// In the way of trainers' logs: names before values, bars between.
void StepObserver::Summarize(const StepEvent& event) {
  (event.outcome.applied ? applied_ : skipped_) += 1;
  const std::int64_t step = event.outcome.step;
  if (options_.summary_every <= 0 || (step + 1) % options_.summary_every != 0) return;
  const absl::Time now = absl::UnixEpoch() + absl::Seconds(event.end_seconds);
  const std::int64_t steps = applied_ + skipped_;
  std::string line = absl::StrFormat(
      "run \"%s\": step %d | applied %d | skipped %d | loss scale %g | grad norm %.4g",
      spec().name, step, applied_, skipped_, event.outcome.next_loss_scale,
      event.outcome.grad_norm);
  for (const auto& [group, rate] : event.learning_rates) {
    line += absl::StrFormat(" | lr %s %.4g", group, rate);
  }
  if (worst_residual_ > 0) line += absl::StrFormat(" | worst residual %.3f", worst_residual_);
  if (event.stale_tensors > 0) line += absl::StrFormat(" | stale tensors %d", event.stale_tensors);
  if (summarized_ != absl::InfinitePast()) {
    line += absl::StrFormat(" | ms per step %.2f",
                            absl::ToDoubleMilliseconds(now - summarized_) / steps);
  }
  spdlog::info("{}", line);
  summarized_ = now;
  applied_ = skipped_ = 0;
}

}  // namespace muond
