// What a verb of muonctl is. A new verb is one file verb_<name>.cc, a line here, a row in verbs.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "client/cpp/admin.h"

namespace muond::cli {

enum ExitCode : int {
  kOk = 0,
  kError = 1,      // the daemon refused, or none answers
  kUsage = 2,      // the command line makes no sense
  kUnhealthy = 3,  // it answers, and says that it is not well
};

enum class Output : std::uint8_t { kTable, kJson, kCsv };

// What every verb may use.
struct VerbContext {
  client::Admin& admin;
  std::string endpoint;  // for messages
  std::string run;       // --run or MUOND_RUN; empty: not said
  Output output = Output::kTable;
  bool color = false;
  bool terminal = false;  // `out` is one
  absl::Duration timeout;  // of each call
  std::ostream& out;
};

// Carries the verb out, prints to context.out, returns the exit code.
using VerbBody = std::function<absl::StatusOr<ExitCode>(VerbContext& context)>;

struct Verb {
  const char* name;
  const char* help;
  // Adds the verb's own options to its subcommand; what it returns runs after parsing.
  VerbBody (*attach)(CLI::App& command);
};

VerbBody AttachBench(CLI::App& command);
VerbBody AttachCheckpoint(CLI::App& command);
VerbBody AttachCompletion(CLI::App& command);
VerbBody AttachConfig(CLI::App& command);
VerbBody AttachDigest(CLI::App& command);
VerbBody AttachDoctor(CLI::App& command);
VerbBody AttachDrain(CLI::App& command);
VerbBody AttachHealth(CLI::App& command);
VerbBody AttachParams(CLI::App& command);
VerbBody AttachPlan(CLI::App& command);
VerbBody AttachRouting(CLI::App& command);
VerbBody AttachRuns(CLI::App& command);
VerbBody AttachStatus(CLI::App& command);
VerbBody AttachTop(CLI::App& command);
VerbBody AttachTrace(CLI::App& command);
VerbBody AttachVersion(CLI::App& command);
VerbBody AttachWatch(CLI::App& command);

// All verbs, in the order of --help.
const std::vector<Verb>& AllVerbs();

// context.run, or the daemon's only run when none was named. FAILED_PRECONDITION that lists the
// runs when there are several, NOT_FOUND when there is none.
absl::StatusOr<std::string> TheRun(VerbContext& context);

// "muonctl"'s own version: "0.1.0".
std::string ClientVersion();

}  // namespace muond::cli
