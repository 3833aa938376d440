// `muonctl trace`: watches some steps on all daemons of a run and writes what they did when.
#include <fstream>
#include <memory>
#include <ostream>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/chrome_trace.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

struct TraceFlags {
  std::int64_t steps = 5;
  double seconds = 60;
  std::string file = "muond-trace.json";
};

// The events of `steps` steps, as one daemon told them.
absl::StatusOr<std::vector<v1::StepEvent>> Collect(client::Admin& admin, const std::string& run,
                                                   const TraceFlags& flags) {
  std::vector<v1::StepEvent> events;
  absl::Status status =
      admin.Watch(run, absl::Seconds(flags.seconds), [&](const v1::StepEvent& event) {
        events.push_back(event);
        return static_cast<std::int64_t>(events.size()) < flags.steps;
      });
  if (!status.ok() && !(absl::IsDeadlineExceeded(status) && !events.empty())) return status;
  return events;
}

// All daemons at once: they step together.
absl::StatusOr<std::vector<v1::StepEvent>> CollectFromAll(VerbContext& context,
                                                          const v1::RunStatus& run,
                                                          const TraceFlags& flags) {
  if (run.daemons_size() < 2) return Collect(context.admin, run.run(), flags);
  std::vector<absl::StatusOr<std::vector<v1::StepEvent>>> parts(run.daemons_size());
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < run.daemons_size(); ++i) {
      threads.emplace_back([&, i] {
        client::Admin admin(run.daemons(i), context.timeout);
        parts[i] = Collect(admin, run.run(), flags);
      });
    }
  }
  std::vector<v1::StepEvent> all;
  for (int i = 0; i < run.daemons_size(); ++i) {
    if (!parts[i].ok()) {
      return absl::Status(parts[i].status().code(),
                          absl::StrFormat("trace: daemon \"%s\": %s", run.daemons(i),
                                          parts[i].status().message()));
    }
    all.insert(all.end(), parts[i]->begin(), parts[i]->end());
  }
  return all;
}

}  // namespace

VerbBody AttachTrace(CLI::App& command) {
  auto flags = std::make_shared<TraceFlags>();
  command.add_option("--steps", flags->steps, "how many steps")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  command.add_option("--for", flags->seconds, "longest wait for them, in seconds")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  command.add_option("--file", flags->file, "where to write; -: to the output")
      ->type_name("PATH")
      ->capture_default_str();
  command.footer("Open the file in chrome://tracing or at ui.perfetto.dev.");
  return [flags](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string name, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, context.admin.Status(name));
    MUOND_ASSIGN_OR_RETURN(const std::vector<v1::StepEvent> events,
                           CollectFromAll(context, status.runs(0), *flags));
    const std::string text = ChromeTrace(events).dump() + "\n";
    if (flags->file == "-") {
      context.out << text;
      return kOk;
    }
    std::ofstream file(flags->file);
    file << text;
    file.close();
    if (!file) {
      return absl::PermissionDeniedError(
          absl::StrFormat("trace: cannot write \"%s\"", flags->file));
    }
    context.out << absl::StrFormat("%s: %d steps of %d daemons\n", flags->file,
                                   flags->steps, std::max(1, status.runs(0).daemons_size()));
    return kOk;
  };
}

}  // namespace muond::cli
