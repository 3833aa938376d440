#include <memory>
#include <ostream>

#include "client/cli/message_json.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

// Why a run is not well; empty when it is.
std::string Complaint(const v1::RunStatus& run) {
  if (run.position().state() == v1::RUN_STATE_FAILED) return "failed: " + run.failure();
  if (run.state_nonfinite() > 0) return "its state holds non-finite elements";
  return "";
}

}  // namespace

VerbBody AttachHealth(CLI::App& command) {
  auto service = std::make_shared<std::string>();
  command
      .add_option("--service", *service,
                  "liveness: the process works; readiness: it accepts steps; none: both")
      ->check(CLI::IsMember({"liveness", "readiness"}));
  command.footer(
      "With --run the run must be well too: neither failed nor with non-finite state.\n"
      "Exit code 3 when something is not well, or when no daemon answers.");
  return [service](VerbContext& context) -> absl::StatusOr<ExitCode> {
    auto health = context.admin.Health(*service);
    // A daemon that doesn't answer is not well: a probe needs no third case.
    if (absl::IsUnavailable(health.status()) || absl::IsDeadlineExceeded(health.status())) {
      health = "NOT_ANSWERING";
    }
    MUOND_RETURN_IF_ERROR(health.status());
    std::string complaint;
    if (*health == "SERVING" && !context.run.empty()) {
      MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, context.admin.Status(context.run));
      for (const v1::RunStatus& run : status.runs()) complaint = Complaint(run);
    }
    const bool well = *health == "SERVING" && complaint.empty();
    if (context.output == Output::kJson) {
      context.out << JsonText({{"endpoint", context.endpoint},
                               {"service", *service},
                               {"status", *health},
                               {"run", context.run},
                               {"complaint", complaint},
                               {"healthy", well}});
      return well ? kOk : kUnhealthy;
    }
    context.out << Paint(*health, *health == "SERVING" ? Color::kGood : Color::kBad, context.color)
                << "\n";
    if (!complaint.empty()) {
      context.out << absl::StrFormat("run \"%s\": %s\n", context.run, complaint);
    }
    return well ? kOk : kUnhealthy;
  };
}

}  // namespace muond::cli
