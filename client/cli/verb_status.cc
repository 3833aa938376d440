#include <algorithm>
#include <map>
#include <ostream>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/render.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

std::string StateName(v1::RunState state) {
  const auto* value = v1::RunState_descriptor()->FindValueByNumber(state);
  return value == nullptr ? FormatCount(state) : ShortEnumName(*value);
}

std::int64_t Skipped(const v1::RunStatus& run) {
  std::int64_t sum = 0;
  for (const auto& [cause, count] : run.steps_skipped()) sum += count;
  return sum;
}

}  // namespace

TextTable RunTable(const v1::StatusReply& status) {
  TextTable table;
  table.AddColumn("RUN", Align::kLeft);
  table.AddColumn("STATE", Align::kLeft);
  for (const char* name : {"RANKS", "NEXT STEP", "APPLIED", "SKIPPED", "LOSS SCALE", "GRAD NORM",
                           "MUON", "ADAMW", "MATRICES", "NS CALLS", "ELEMENTS", "MEMORY"}) {
    table.AddColumn(name, Align::kRight);
  }
  for (const v1::RunStatus& run : status.runs()) {
    const bool failed = run.position().state() == v1::RUN_STATE_FAILED;
    table.AddRow({{run.run()},
                  {StateName(run.position().state()), failed ? Color::kBad : Color::kNone},
                  {absl::StrFormat("%d/%d", run.ranks_registered_size(), run.world_size())},
                  {FormatCount(run.position().next_step())},
                  {FormatCount(run.steps_applied())},
                  {FormatCount(Skipped(run))},
                  {FormatNumber(run.loss_scale())},
                  {FormatNumber(run.grad_norm())},
                  {FormatCount(run.muon_parameters())},
                  {FormatCount(run.adamw_parameters())},
                  {FormatCount(run.muon_matrices())},
                  {FormatCount(run.newton_schulz_calls())},
                  {FormatCount(run.elements())},
                  {FormatBytes(run.state_bytes() + run.staging_bytes())}});
  }
  return table;
}

namespace {

// What the table has no room for, a line each.
std::string RunNotes(const v1::RunStatus& run, bool color) {
  std::string notes;
  const auto note = [&](const std::string& text, Color tone = Color::kNone) {
    notes += Paint(absl::StrFormat("run \"%s\": %s", run.run(), text), tone, color) + "\n";
  };
  if (!run.failure().empty()) note("failed: " + run.failure(), Color::kBad);
  if (run.momentum_nonfinite() > 0) {
    note(absl::StrFormat("%d state tensors hold non-finite elements; restore a checkpoint",
                         run.momentum_nonfinite()),
         Color::kBad);
  }
  if (run.step_in_flight()) {
    std::string text = absl::StrFormat("step %d in flight for %s", run.position().next_step(),
                                       FormatSeconds(run.step_in_flight_seconds()));
    if (run.waiting_ranks_size() > 0) {
      text += absl::StrFormat(", waiting for ranks %s", absl::StrJoin(run.waiting_ranks(), ", "));
    }
    if (run.waiting_slices() > 0) text += absl::StrFormat(", %d slices", run.waiting_slices());
    const bool complete = run.waiting_ranks_size() == 0 && run.waiting_slices() == 0;
    note(complete ? text + ", everything is in" : text);
  }
  if (Skipped(run) > 0) {
    const std::map<std::string, std::int64_t> causes(run.steps_skipped().begin(),
                                                     run.steps_skipped().end());
    note("skipped by cause: " + absl::StrJoin(causes, ", ", absl::PairFormatter(" ")));
  }
  if (run.newton_schulz_fallbacks() > 0) {
    note(absl::StrFormat("%d orthogonalizations were redone by the fp32 standard path",
                         run.newton_schulz_fallbacks()));
  }
  return notes;
}

}  // namespace

std::string RenderStatus(const v1::StatusReply& status, bool color) {
  // The description starts with the name.
  const bool described = status.backend_description().starts_with(status.backend());
  std::string text = absl::StrFormat(
      "muond %s  pid %d  up %s  backend %s", status.version(), status.pid(),
      FormatSeconds(status.uptime_seconds()),
      described ? status.backend_description() : status.backend());
  if (status.runs_size() == 0) return text + "\n\nno run\n";
  text += "\n\n" + RunTable(status).Render(color);
  std::string notes;
  for (const v1::RunStatus& run : status.runs()) notes += RunNotes(run, color);
  return notes.empty() ? text : text + "\n" + notes;
}

VerbBody AttachStatus(CLI::App& command) {
  return [](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, context.admin.Status(context.run));
    context.out << (context.output == Output::kJson  ? JsonText(MessageToJson(status))
                    : context.output == Output::kCsv ? RunTable(status).Csv()
                                                     : RenderStatus(status, context.color));
    return kOk;
  };
}

VerbBody AttachRuns(CLI::App&) {
  return [](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, context.admin.Status(context.run));
    if (context.output == Output::kJson) {
      context.out << JsonText(MessageToJson(status)["runs"]);
    } else {
      const TextTable table = RunTable(status);
      context.out << (context.output == Output::kCsv ? table.Csv() : table.Render(context.color));
    }
    return kOk;
  };
}

}  // namespace muond::cli
