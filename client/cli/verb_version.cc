#include <ostream>

#include "absl/strings/str_format.h"
#include "client/cli/message_json.h"
#include "client/cli/verb.h"

namespace muond::cli {

VerbBody AttachVersion(CLI::App& command) {
  return [](VerbContext& context) -> absl::StatusOr<ExitCode> {
    // Whether a daemon answers is not the question here: its absence is part of the answer.
    const auto status = context.admin.Status();
    if (context.output == Output::kJson) {
      context.out << JsonText({{"client", ClientVersion()},
                               {"endpoint", context.endpoint},
                               {"daemon", status.ok() ? Json(status->version()) : Json(nullptr)}});
      return kOk;
    }
    context.out << absl::StrFormat("muonctl  %s\n", ClientVersion());
    if (!status.ok()) {
      context.out << absl::StrFormat("muond    none answers at \"%s\"\n", context.endpoint);
      return kOk;
    }
    context.out << absl::StrFormat("muond    %s at \"%s\"\n", status->version(), context.endpoint);
    if (status->version() != ClientVersion()) {
      context.out << "the versions differ: what one of them added, the other does not know\n";
    }
    return kOk;
  };
}

}  // namespace muond::cli
