// `muonctl config`, `muonctl drain`, `muonctl bench`: running a daemon.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <ostream>
#include <system_error>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/message_json.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "proto/check.h"
#include "proto/steady_time.h"

namespace muond::cli {
namespace {

constexpr absl::Duration kDrainPoll = absl::Milliseconds(200);

void ShowDrain(VerbContext& context, const v1::DrainReply& reply) {
  if (context.output == Output::kJson) {
    context.out << JsonText(MessageToJson(reply));
    return;
  }
  context.out << (reply.draining() ? "draining: no new runs" : "new runs are taken") << "\n";
  for (const std::string& run : reply.open_runs()) {
    context.out << absl::StrFormat("run \"%s\" is open\n", run);
  }
}

// The program beside this one, else the one that PATH finds.
std::string BenchProgram() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = self.parent_path() / "muond-bench";
  return !error && access(beside.c_str(), X_OK) == 0 ? beside.string() : "muond-bench";
}

}  // namespace

VerbBody AttachConfig(CLI::App&) {
  return [](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const v1::SettingsReply reply, context.admin.Settings());
    if (context.output == Output::kJson) {
      context.out << JsonText(MessageToJson(reply)["settings"]);
      return kOk;
    }
    TextTable table;
    for (const char* name : {"SETTING", "VALUE", "SOURCE"}) table.AddColumn(name, Align::kLeft);
    for (const v1::Setting& setting : reply.settings()) {
      table.AddRow({{setting.name()}, {absl::StrJoin(setting.values(), ", ")}, {setting.source()}});
    }
    context.out << (context.output == Output::kCsv ? table.Csv() : table.Render(context.color));
    return kOk;
  };
}

VerbBody AttachDrain(CLI::App& command) {
  auto cancel = std::make_shared<bool>(false);
  auto wait = std::make_shared<double>(0);
  command.add_flag("--cancel", *cancel, "take new runs again");
  command.add_option("--wait", *wait, "wait so many seconds for the open runs to close")
      ->type_name("SECONDS");
  command.footer(
      "Open runs go on; readiness probes fail, so that nothing new is sent here. When no run is\n"
      "open the daemon can be stopped. Exit code 3 when runs are open after --wait.");
  return [cancel, wait](VerbContext& context) -> absl::StatusOr<ExitCode> {
    const absl::Time end = SteadyNow() + absl::Seconds(*wait);
    MUOND_ASSIGN_OR_RETURN(v1::DrainReply reply, context.admin.Drain(*cancel));
    while (!*cancel && reply.open_runs_size() > 0 && SteadyNow() < end) {
      absl::SleepFor(kDrainPoll);
      MUOND_ASSIGN_OR_RETURN(reply, context.admin.Drain(false));
    }
    ShowDrain(context, reply);
    return *wait > 0 && !*cancel && reply.open_runs_size() > 0 ? kUnhealthy : kOk;
  };
}

VerbBody AttachBench(CLI::App& command) {
  command.fallthrough(false)->prefix_command();  // what follows is muond-bench's
  command.footer("Everything behind `bench` goes to muond-bench; --endpoint is added.");
  return [&command](VerbContext& context) -> absl::StatusOr<ExitCode> {
    std::vector<std::string> arguments = command.remaining();
    const std::string program = BenchProgram();
    arguments.insert(arguments.begin(), {program, "--endpoint", context.endpoint});
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    context.out.flush();
    execvp(program.c_str(), argv.data());
    return absl::NotFoundError(
        absl::StrFormat("cannot run \"%s\": %s", program, std::strerror(errno)));
  };
}

}  // namespace muond::cli
