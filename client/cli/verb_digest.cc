#include <map>
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "client/cli/message_json.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

std::string RenderDigest(const v1::DigestReply& reply) {
  std::string text = absl::StrFormat("version  %d\ntensor   %s\ncontrol  %s\n", reply.version(),
                                     reply.tensor_digest(), reply.control_digest());
  if (reply.parameters().empty()) return text;
  TextTable table;
  table.AddColumn("PARAMETER", Align::kLeft);
  table.AddColumn("DIGEST", Align::kLeft);
  const std::map<std::string, std::string> sorted(reply.parameters().begin(),
                                                  reply.parameters().end());
  for (const auto& [name, digest] : sorted) table.AddRow({{name}, {digest}});
  return text + "\n" + table.Render(false);
}

}  // namespace

VerbBody AttachDigest(CLI::App& command) {
  auto per_parameter = std::make_shared<bool>(false);
  command.add_flag("--per-parameter", *per_parameter, "the digest of each parameter too");
  command.footer(
      "The tensor digest covers parameters, optimizer state and t: it is the same for any\n"
      "sharding, and a skipped step leaves it alone. The control digest covers step counter,\n"
      "loss scale and generation.");
  return [per_parameter](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string run, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::DigestReply reply, context.admin.Digest(run, *per_parameter));
    context.out << (context.output == Output::kJson ? JsonText(MessageToJson(reply))
                                                    : RenderDigest(reply));
    return kOk;
  };
}

}  // namespace muond::cli
