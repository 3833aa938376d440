#include "absl/strings/str_format.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {

const std::vector<Verb>& AllVerbs() {
  static const std::vector<Verb>& verbs = *new std::vector<Verb>{
      {"status", "what the daemon and its runs are doing", &AttachStatus},
      {"top", "the same again and again, with the steps in between", &AttachTop},
      {"runs", "the runs, a line each", &AttachRuns},
      {"params", "the parameters of a run: algorithm and why, matrices, norms", &AttachParams},
      {"routing", "how many parameters go to which algorithm, and why", &AttachRouting},
      {"watch", "each step as it ends, with the names of offenders", &AttachWatch},
      {"trace", "a Chrome/Perfetto trace of some steps on all daemons", &AttachTrace},
      {"health", "whether the daemon is well: exit code 0, or 3", &AttachHealth},
      {"digest", "digests of a run's whole optimizer state", &AttachDigest},
      {"checkpoint", "save, restore, list, verify, show, compare, prune", &AttachCheckpoint},
      {"plan", "who would own what on how many daemons; asks none", &AttachPlan},
      {"drain", "take no new runs, or take them again", &AttachDrain},
      {"doctor", "what is wrong with this machine, and the remedy", &AttachDoctor},
      {"config", "the daemon's settings and where they came from", &AttachConfig},
      {"bench", "muond-bench against this daemon", &AttachBench},
      {"completion", "a script that completes muonctl's command line", &AttachCompletion},
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
