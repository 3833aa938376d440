#include <map>
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "client/cli/checkpoint_files.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

VerbBody AttachSave(CLI::App& command) {
  command.footer("Waits until the checkpoint is durable: --timeout 10m for large runs.");
  return [](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string run, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::SaveReply reply, context.admin.SaveCheckpoint(run));
    if (context.output == Output::kJson) {
      context.out << JsonText(MessageToJson(reply));
    } else {
      context.out << absl::StrFormat("%s: %s in %.3f s%s\n", reply.name(),
                                     FormatBytes(reply.bytes()), reply.seconds(),
                                     reply.known() ? " (it was there already)" : "");
    }
    return kOk;
  };
}

VerbBody AttachRestore(CLI::App& command) {
  auto name = std::make_shared<std::string>();
  auto relayout = std::make_shared<bool>(false);
  command.add_option("name", *name, "the checkpoint, as ckpt-1200; else the newest that is whole");
  command.add_flag("--allow-relayout", *relayout,
                   "matrices may be seen otherwise (whole or split) than when it was saved");
  command.footer("Takes the run back on all daemons; trainers are told to go on from there.");
  return [name, relayout](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string run, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::RestoreReply reply,
                           context.admin.RestoreCheckpoint(run, *name, *relayout));
    if (context.output == Output::kJson) {
      context.out << JsonText(MessageToJson(reply));
    } else {
      context.out << absl::StrFormat("restored from %s: the next step is %d, generation %d\n",
                                     reply.name(), reply.position().next_step(),
                                     reply.position().generation());
    }
    return kOk;
  };
}

}  // namespace

VerbBody AttachCheckpoint(CLI::App& command) {
  command.require_subcommand(1);
  struct Row {
    const char* name;
    const char* help;
    VerbBody (*attach)(CLI::App&);
  };
  static constexpr Row kRows[] = {
      {"save", "save the run now; asks a daemon", &AttachSave},
      {"restore", "take the run back to a checkpoint; asks a daemon", &AttachRestore},
      {"list", "the checkpoints in a directory", &AttachCheckpointList},
      {"verify", "read every byte and compare checksums: exit code 0, or 3",
       &AttachCheckpointVerify},
      {"show", "what one checkpoint holds", &AttachCheckpointShow},
      {"diff", "what two checkpoints differ in: exit code 0 when in nothing, else 3",
       &AttachCheckpointDiff},
      {"prune", "remove all but the newest", &AttachCheckpointPrune},
  };
  auto bodies = std::make_shared<std::map<std::string, VerbBody>>();
  for (const Row& row : kRows) {
    (*bodies)[row.name] = row.attach(*command.add_subcommand(row.name, row.help));
  }
  return [bodies, &command](VerbContext& context) {
    return bodies->at(command.get_subcommands().front()->get_name())(context);
  };
}

}  // namespace muond::cli
