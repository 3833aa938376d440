#include "absl/strings/str_format.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {

const std::vector<Verb>& AllVerbs() {
  static const std::vector<Verb>& verbs = *new std::vector<Verb>{
      {"status", "what the daemon and its runs are doing", &AttachStatus},
      {"params", "the parameters of a run: algorithm and why, matrices, norms", &AttachParams},
      {"health", "whether the daemon is well: exit code 0, or 3", &AttachHealth},
      {"digest", "digests of a run's whole optimizer state", &AttachDigest},
      {"checkpoint", "save, restore, list, verify, show, compare, prune", &AttachCheckpoint},
      {"plan", "who would own what on how many daemons; asks none", &AttachPlan},
      {"version", "versions of this program and of the daemon", &AttachVersion},
  };
  return verbs;
}

absl::StatusOr<std::string> TheRun(VerbContext& context) {
  if (!context.run.empty()) return context.run;
  MUOND_ASSIGN_OR_RETURN(const v1::StatusReply status, context.admin.Status());
  if (status.runs_size() == 1) return status.runs(0).run();
  if (status.runs_size() == 0) return absl::NotFoundError("the daemon has no run");
  std::string names;
  for (const v1::RunStatus& run : status.runs()) {
    names += absl::StrFormat("%s\"%s\"", names.empty() ? "" : ", ", run.run());
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("the daemon has several runs, choose one with --run: %s", names));
}

std::string ClientVersion() { return MUOND_VERSION; }

}  // namespace muond::cli
