#include "client/examples/char_lm/report.h"

#include <algorithm>
#include <fstream>
#include <numeric>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"

namespace muond::char_lm {
namespace {

std::string AlgorithmOf(const v1::RoutedParameter& parameter) {
  switch (parameter.algorithm()) {
    case v1::ALGORITHM_MUON: return "muon";
    case v1::ALGORITHM_ADAMW: return "adamw";
    default: return "auto";
  }
}

std::int64_t Skipped(const TrainResult& result) {
  const auto& causes = result.status.steps_skipped();
  return std::accumulate(causes.begin(), causes.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& cause) { return sum + cause.second; });
}

nlohmann::json Curve(const TrainResult& result) {
  nlohmann::json points = nlohmann::json::array();
  for (const LossPoint& point : result.curve) points.push_back({point.step, point.validation});
  return points;
}

nlohmann::json Sweep(const std::vector<Candidate>& candidates) {
  nlohmann::json tried = nlohmann::json::array();
  for (const Candidate& candidate : candidates) {
    tried.push_back({candidate.lr, candidate.validation_loss});
  }
  return tried;
}

std::string SkippedText(const TrainResult& result) {
  std::vector<std::string> causes;
  for (const auto& [cause, count] : result.status.steps_skipped()) {
    if (count > 0) causes.push_back(absl::StrFormat("%s %d", cause, count));
  }
  std::sort(causes.begin(), causes.end());
  return causes.empty() ? "0" : absl::StrFormat("%d (%s)", Skipped(result),
                                                absl::StrJoin(causes, ", "));
}

void AddRun(const char* name, const std::string& lr, const TrainResult& result,
            std::string& table) {
  absl::StrAppendFormat(
      &table, "  %-6s lr %-13s validation loss %.4f -> %.4f nats/char   %5.1f steps/s\n", name,
      lr, result.curve.front().validation, result.final_loss(), result.steps_per_second);
}

std::string VerdictText(const Report& report) {
  const Verdict verdict = Compare(report.muon.curve, report.adamw.curve);
  if (!verdict.ahead.has_value()) return "  muon and adamw ended level\n";
  const bool muon = *verdict.ahead == Optimizer::kMuon;
  const std::int64_t fewer = verdict.steps - verdict.reached_at;
  return absl::StrFormat(
      "  %s is ahead by %.4f nats/char: at step %d of %d it had what %s ended with (%d steps "
      "fewer, %.0f %%; seed %d)\n",
      muon ? "muon with adamw" : "adamw alone", verdict.margin, verdict.reached_at, verdict.steps,
      muon ? "adamw alone" : "muon with adamw", fewer,
      100.0 * static_cast<double>(fewer) / static_cast<double>(verdict.steps),
      report.settings.seed);
}

absl::Status WriteFile(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnavailableError(absl::StrFormat("file \"%s\": cannot be written", path));
}

}  // namespace

std::string CompressScales(std::span<const double> scales) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < scales.size();) {
    std::size_t end = i;
    while (end < scales.size() && scales[end] == scales[i]) ++end;
    runs.push_back(absl::StrFormat("%.0f x%d", scales[i], end - i));
    i = end;
  }
  return absl::StrJoin(runs, ", ");
}

nlohmann::json Summary(const Report& report) {
  const v1::RunStatus& status = report.muon.status;
  nlohmann::json parameters = nlohmann::json::array();
  for (const auto& parameter : report.muon.routing.parameters()) {
    parameters.push_back({{"name", parameter.name()},
                          {"algorithm", AlgorithmOf(parameter)},
                          {"reason", parameter.reason()}});
  }
  const Verdict verdict = Compare(report.muon.curve, report.adamw.curve);
  return {
      {"parameters", parameters},
      {"muon_matrices", status.muon_matrices()},
      {"newton_schulz_calls", status.newton_schulz_calls()},
      {"newton_schulz_fallbacks", status.newton_schulz_fallbacks()},
      {"steps_applied", status.steps_applied()},
      {"steps_skipped", Skipped(report.muon)},
      {"loss_scale", report.muon.loss_scale},
      {"initial_loss_scale", report.settings.initial_loss_scale},
      {"momentum_nonfinite", status.momentum_nonfinite()},
      {"validation_loss", {{"muon", Curve(report.muon)}, {"adamw", Curve(report.adamw)}}},
      {"state_digest", report.muon.tensor_digest},
      {"control_digest", report.muon.control_digest},
      {"lr", {{"muon", report.muon_lr}, {"adamw", report.adamw_lr}}},
      {"lr_sweep", {{"muon", Sweep(report.muon_sweep)}, {"adamw", Sweep(report.adamw_sweep)}}},
      {"steps_per_second",
       {{"muon", report.muon.steps_per_second}, {"adamw", report.adamw.steps_per_second}}},
      {"ahead", verdict.ahead.has_value() ? OptimizerName(*verdict.ahead) : "none"},
      {"ahead_reached_at_step", verdict.reached_at},
      {"seed", report.settings.seed},
      {"text", report.text_path},
      {"books_held_out", report.corpus->validation_books},
  };
}

std::string LossCsv(const Report& report) {
  std::string csv = "optimizer,step,train_loss,validation_loss\n";
  for (const Optimizer optimizer : {Optimizer::kMuon, Optimizer::kAdamW}) {
    const TrainResult& result = optimizer == Optimizer::kMuon ? report.muon : report.adamw;
    for (const LossPoint& point : result.curve) {
      absl::StrAppendFormat(&csv, "%s,%d,%.6f,%.6f\n", OptimizerName(optimizer), point.step,
                            point.train, point.validation);
    }
  }
  return csv;
}

std::string Table(const Report& report) {
  const v1::RunStatus& status = report.muon.status;
  std::string table = "\nparameters of the muon run\n";
  for (const auto& parameter : report.muon.routing.parameters()) {
    absl::StrAppendFormat(&table, "  %-13s %-6s %s\n", parameter.name(), AlgorithmOf(parameter),
                          parameter.reason());
  }
  absl::StrAppendFormat(
      &table,
      "steps of the muon run\n"
      "  applied %d, skipped %s\n"
      "  Newton-Schulz calls %d = %d matrices x %d applied steps, fallbacks %d\n"
      "  momentum tensors with non-finite elements: %d\n"
      "  loss scale %s\n"
      "  state digest %s\n",
      status.steps_applied(), SkippedText(report.muon), status.newton_schulz_calls(),
      status.muon_matrices(), status.steps_applied(), status.newton_schulz_fallbacks(),
      status.momentum_nonfinite(), CompressScales(report.muon.loss_scale),
      report.muon.tensor_digest);
  absl::StrAppendFormat(&table, "muon with adamw, adamw alone (held out: %s)\n",
                        absl::StrJoin(report.corpus->validation_books, ", "));
  AddRun("muon", absl::StrFormat("%g, %g", report.muon_lr, report.adamw_lr), report.muon, table);
  AddRun("adamw", absl::StrFormat("%g", report.adamw_lr), report.adamw, table);
  return table + VerdictText(report);
}

absl::Status WriteFiles(const Report& report, const std::string& directory) {
  MUOND_RETURN_IF_ERROR(WriteFile(directory + "/summary.json", Summary(report).dump(1) + "\n"));
  return WriteFile(directory + "/loss.csv", LossCsv(report));
}

}  // namespace muond::char_lm
