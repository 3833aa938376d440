#include <algorithm>
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/render.h"
#include "client/cli/text_table.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

std::string AlgorithmName(v1::Algorithm algorithm) {
  const auto* value = v1::Algorithm_descriptor()->FindValueByNumber(algorithm);
  return value == nullptr ? FormatCount(algorithm) : ShortEnumName(*value);
}

}  // namespace

TextTable ParameterTable(const v1::DescribeParametersReply& reply) {
  const auto& parameters = reply.parameters();
  const bool bad = std::any_of(parameters.begin(), parameters.end(),
                               [](const auto& p) { return p.nonfinite_elements() > 0; });
  TextTable table;
  for (const char* name : {"NAME", "SHAPE", "GROUP", "ALGORITHM", "REASON", "MATRICES"}) {
    table.AddColumn(name, Align::kLeft);
  }
  for (const char* name : {"T", "LR", "MOMENTUM NORM", "WEIGHT NORM"}) {
    table.AddColumn(name, Align::kRight);
  }
  if (bad) table.AddColumn("NON-FINITE", Align::kRight);
  for (const v1::ParameterState& state : parameters) {
    const v1::RoutedParameter& routed = state.routed();
    std::string reason = routed.reason();
    if (!routed.tied_to().empty()) reason += absl::StrFormat(", tied to %s", routed.tied_to());
    std::vector<Cell> row = {{state.parameter().name()},
                             {FormatShape(state.parameter())},
                             {state.parameter().group()},
                             {AlgorithmName(routed.algorithm())},
                             {reason},
                             {FormatMatrices(routed)},
                             {FormatCount(state.t())},
                             {FormatNumber(state.hyperparameters().lr())},
                             {FormatNumber(state.momentum_norm())},
                             {FormatNumber(state.weight_norm())}};
    if (bad) {
      row.push_back({FormatCount(state.nonfinite_elements()),
                     state.nonfinite_elements() > 0 ? Color::kBad : Color::kNone});
    }
    table.AddRow(std::move(row));
  }
  return table;
}

std::string RenderParameters(const v1::DescribeParametersReply& reply, bool color) {
  std::int64_t muon = 0;
  std::int64_t adamw = 0;
  std::int64_t matrices = 0;
  for (const v1::ParameterState& state : reply.parameters()) {
    const v1::RoutedParameter& routed = state.routed();
    if (!routed.tied_to().empty()) continue;
    (routed.algorithm() == v1::ALGORITHM_MUON ? muon : adamw) += 1;
    for (const auto& view : routed.matrices()) matrices += view.count();
  }
  return ParameterTable(reply).Render(color) +
         absl::StrFormat("\nMuon %d (matrices %d), AdamW %d\n", muon, matrices, adamw);
}

namespace {

absl::StatusOr<ExitCode> ShowWorst(VerbContext& context, const std::string& run,
                                   const v1::DescribeParametersReply& describe) {
  MUOND_ASSIGN_OR_RETURN(const v1::LastStepsReply last, context.admin.LastSteps(run));
  const v1::StepEvent event = last.steps().empty() ? v1::StepEvent() : last.steps(0);
  if (context.output == Output::kJson) {
    Json json = MessageToJson(event);
    for (const char* key : {"phases", "outcome", "missed", "learning_rates"}) json.erase(key);
    context.out << JsonText(json);
    return kOk;
  }
  const TextTable table = WorstTable(event, describe);
  context.out << (context.output == Output::kCsv ? table.Csv() : table.Render(context.color));
  return kOk;
}

}  // namespace

VerbBody AttachParams(CLI::App& command) {
  auto names = std::make_shared<std::vector<std::string>>();
  auto worst = std::make_shared<bool>(false);
  command.add_option("names", *names, "only these parameters")->type_name("NAME");
  command.add_flag("--worst", *worst,
                   "the largest residuals, update ratios and gradients of the last steps, and what "
                   "is not finite");
  return [names, worst](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string run, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::DescribeParametersReply reply,
                           context.admin.DescribeParameters(run, *names));
    if (*worst) return ShowWorst(context, run, reply);
    context.out << (context.output == Output::kJson  ? JsonText(MessageToJson(reply))
                    : context.output == Output::kCsv ? ParameterTable(reply).Csv()
                                                     : RenderParameters(reply, context.color));
    return kOk;
  };
}

}  // namespace muond::cli
