// `muonctl top`: status again and again, and how fast steps come.
#include <map>
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/render.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

constexpr char kClear[] = "\x1b[H\x1b[2J";

// Steps ended per second since the picture before, by run.
class Rates {
 public:
  std::string Of(const v1::RunStatus& run, absl::Time now) {
    const std::int64_t step = run.position().next_step();
    const auto [seen, first] = seen_.try_emplace(run.run(), Seen{step, now});
    const double seconds = absl::ToDoubleSeconds(now - seen->second.at);
    const double rate = static_cast<double>(step - seen->second.step) / seconds;
    seen->second = {step, now};
    return first || seconds <= 0 ? "-" : absl::StrFormat("%.1f", rate);
  }

 private:
  struct Seen {
    std::int64_t step;
    absl::Time at;
  };
  std::map<std::string, Seen> seen_;
};

std::string LastSteps(const v1::StatusReply& status, const v1::LastStepsReply& last, Rates& rates,
                      bool color) {
  const absl::Time now = absl::Now();
  std::string text;
  for (const v1::RunStatus& run : status.runs()) {
    text += absl::StrFormat("\nrun \"%s\": %s steps per second\n", run.run(), rates.Of(run, now));
    for (const v1::StepEvent& event : last.steps()) {
      if (event.run() != run.run()) continue;
      text += RenderEvent(event, color) + WorstTable(event, {}).Render(color);
    }
  }
  return text;
}

}  // namespace

VerbBody AttachTop(CLI::App& command) {
  auto interval = std::make_shared<double>(1.0);
  auto count = std::make_shared<int>(0);
  command.add_option("--interval", *interval, "seconds between pictures")
      ->check(CLI::Range(0.05, 3600.0))
      ->capture_default_str();
  command.add_option("--count", *count, "end after so many; 0: go on")->type_name("N");
  return [interval, count](VerbContext& context) -> absl::StatusOr<ExitCode> {
    Rates rates;
    for (int picture = 1;; ++picture) {
      MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, context.admin.Status(context.run));
      MUOND_ASSIGN_OR_RETURN(const v1::LastStepsReply last, context.admin.LastSteps(context.run));
      if (context.output == Output::kJson) {
        context.out << MessageToJson(status).dump() << "\n";
      } else if (context.output == Output::kCsv) {
        context.out << RunTable(status).Csv();
      } else {
        if (context.terminal) context.out << kClear;
        context.out << RenderStatus(status, context.color)
                    << LastSteps(status, last, rates, context.color);
      }
      context.out.flush();
      if (picture == *count) return kOk;
      absl::SleepFor(absl::Seconds(*interval));
    }
  };
}

}  // namespace muond::cli
