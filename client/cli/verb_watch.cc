// `muonctl watch`: each step as it ends.
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/render.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

using Remarkables = google::protobuf::RepeatedPtrField<v1::Remarkable>;

std::string First(const char* what, const Remarkables& list) {
  if (list.empty()) return "";
  return absl::StrFormat("  %s %s (%s)", what, FormatNumber(list[0].value()), list[0].parameter());
}

std::string CauseName(v1::SkipCause cause) {
  const auto* value = v1::SkipCause_descriptor()->FindValueByNumber(cause);
  return value == nullptr ? FormatCount(cause) : ShortEnumName(*value);
}

}  // namespace

std::string RenderEvent(const v1::StepEvent& event, bool color) {
  const v1::StepOutcome& outcome = event.outcome();
  const std::string fate = outcome.applied() ? "applied" : "skipped: " + CauseName(outcome.cause());
  std::string line = absl::StrFormat(
      "%s  step %d  %s  scale %s%s  grad norm %s", event.run(), outcome.step(),
      Paint(fate, outcome.applied() ? Color::kGood : Color::kBad, color),
      FormatNumber(outcome.next_loss_scale()),
      event.scale_change() > 0 ? " (grown)" : event.scale_change() < 0 ? " (backed off)" : "",
      FormatNumber(outcome.grad_norm()));
  if (event.begin_seconds() > 0) {
    line += absl::StrFormat("  %.1f ms", 1e3 * (event.end_seconds() - event.begin_seconds()));
  }
  if (!outcome.offenders().empty()) {
    line += "  not finite in: " + absl::StrJoin(outcome.offenders(), ", ");
  }
  line += First("residual", event.worst_residuals());
  line += First("update ratio", event.worst_update_ratios());
  if (event.stale_tensors() > 0) line += absl::StrFormat("  stale %d", event.stale_tensors());
  if (event.missed() > 0) line += absl::StrFormat("  (%d steps missed)", event.missed());
  return line + "\n";
}

VerbBody AttachWatch(CLI::App& command) {
  auto steps = std::make_shared<std::int64_t>(0);
  auto seconds = std::make_shared<double>(0);
  command.add_option("--steps", *steps, "end after so many; 0: go on")->type_name("N");
  command.add_option("--for", *seconds, "end after so many seconds; 0: go on")
      ->type_name("SECONDS");
  command.footer("-o json writes one object per line.");
  return [steps, seconds](VerbContext& context) -> absl::StatusOr<ExitCode> {
    const absl::Duration longest = *seconds > 0 ? absl::Seconds(*seconds) : absl::Hours(24 * 365);
    std::int64_t seen = 0;
    absl::Status status =
        context.admin.Watch(context.run, longest, [&](const v1::StepEvent& event) {
          if (context.output == Output::kJson) {
            context.out << MessageToJson(event).dump() << "\n";
          } else {
            context.out << RenderEvent(event, context.color);
          }
          context.out.flush();
          return *steps == 0 || ++seen < *steps;
        });
    const bool time_is_up = *seconds > 0 && absl::IsDeadlineExceeded(status);
    if (!status.ok() && !time_is_up) return status;
    return kOk;
  };
}

}  // namespace muond::cli
