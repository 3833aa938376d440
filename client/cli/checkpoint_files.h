// What muonctl does with a directory of checkpoints by itself, without a daemon: it reads them with
// the daemon's own reader (server/checkpoint).
#pragma once

#include "CLI/CLI.hpp"
#include "client/cli/verb.h"

namespace muond::cli {

// Each adds its subcommand to `checkpoint`; what it returns runs when that subcommand was chosen.
VerbBody AttachCheckpointList(CLI::App& command);
VerbBody AttachCheckpointVerify(CLI::App& command);
VerbBody AttachCheckpointShow(CLI::App& command);
VerbBody AttachCheckpointDiff(CLI::App& command);
VerbBody AttachCheckpointPrune(CLI::App& command);

}  // namespace muond::cli
