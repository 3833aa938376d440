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

std::string RenderParameters(const v1::DescribeParametersReply& reply, bool color) {
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
  std::int64_t muon = 0;
  std::int64_t adamw = 0;
  std::int64_t matrices = 0;
  for (const v1::ParameterState& state : parameters) {
    const v1::RoutedParameter& routed = state.routed();
    std::string reason = routed.reason();
    if (!routed.tied_to().empty()) {
      reason += absl::StrFormat(", tied to %s", routed.tied_to());
    } else {
      (routed.algorithm() == v1::ALGORITHM_MUON ? muon : adamw) += 1;
      for (const auto& view : routed.matrices()) matrices += view.count();
    }
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
  return table.Render(color) +
         absl::StrFormat("\nMuon %d (matrices %d), AdamW %d\n", muon, matrices, adamw);
}

VerbBody AttachParams(CLI::App& command) {
  auto names = std::make_shared<std::vector<std::string>>();
  command.add_option("names", *names, "only these parameters")->type_name("NAME");
  return [names](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string run, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::DescribeParametersReply reply,
                           context.admin.DescribeParameters(run, *names));
    context.out << (context.output == Output::kJson ? JsonText(MessageToJson(reply))
                                                    : RenderParameters(reply, context.color));
    return kOk;
  };
}

}  // namespace muond::cli
