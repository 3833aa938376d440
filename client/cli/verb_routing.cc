// `muonctl routing`, and the tables of what offends.
#include <algorithm>
#include <map>
#include <ostream>
#include <tuple>

#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/render.h"
#include "client/cli/verb.h"
#include "proto/check.h"

namespace muond::cli {
namespace {

std::string AlgorithmName(v1::Algorithm algorithm) {
  const auto* value = v1::Algorithm_descriptor()->FindValueByNumber(algorithm);
  return value == nullptr ? FormatCount(algorithm) : ShortEnumName(*value);
}

struct Way {
  std::int64_t parameters = 0, matrices = 0, elements = 0;
  std::string example;
};

// Digits in a reason ("4096 rows") would give each shape a line of its own.
std::string Kind(const std::string& reason) {
  std::string kind;
  for (const char c : reason) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit) {
      kind += c;
    } else if (kind.empty() || kind.back() != '#') {
      kind += '#';
    }
  }
  return kind;
}

}  // namespace

TextTable RoutingTable(const v1::DescribeParametersReply& reply) {
  std::map<std::tuple<std::string, std::string, std::string>, Way> ways;
  for (const v1::ParameterState& state : reply.parameters()) {
    const v1::RoutedParameter& routed = state.routed();
    const std::string reason =
        routed.tied_to().empty() ? Kind(routed.reason()) : "shares the state of another";
    Way& way =
        ways[{state.parameter().group(), AlgorithmName(routed.algorithm()), reason}];
    ++way.parameters;
    std::int64_t elements = 1;
    for (const std::int64_t dim : state.parameter().shape().dims()) elements *= dim;
    way.elements += elements;
    for (const auto& view : routed.matrices()) way.matrices += view.count();
    if (way.example.empty()) way.example = state.parameter().name();
  }
  TextTable table;
  for (const char* name : {"GROUP", "ALGORITHM", "REASON"}) table.AddColumn(name, Align::kLeft);
  for (const char* name : {"PARAMETERS", "MATRICES", "ELEMENTS"}) {
    table.AddColumn(name, Align::kRight);
  }
  table.AddColumn("FOR EXAMPLE", Align::kLeft);
  for (const auto& [key, way] : ways) {
    table.AddRow({{std::get<0>(key)},
                  {std::get<1>(key)},
                  {std::get<2>(key)},
                  {FormatCount(way.parameters)},
                  {FormatCount(way.matrices)},
                  {FormatCount(way.elements)},
                  {way.example}});
  }
  return table;
}

TextTable WorstTable(const v1::StepEvent& event, const v1::DescribeParametersReply& describe) {
  TextTable table;
  table.AddColumn("MEASURE", Align::kLeft);
  table.AddColumn("RANK", Align::kRight);
  table.AddColumn("PARAMETER", Align::kLeft);
  table.AddColumn("VALUE", Align::kRight);
  const auto add = [&table](const char* measure, const auto& list) {
    int rank = 0;
    for (const v1::Remarkable& entry : list) {
      table.AddRow({{measure},
                    {FormatCount(++rank)},
                    {entry.parameter()},
                    {FormatNumber(entry.value())}});
    }
  };
  add("newton-schulz residual", event.worst_residuals());
  add("update/weight RMS", event.worst_update_ratios());
  add("gradient norm", event.largest_gradients());
  int rank = 0;
  for (const v1::ParameterState& state : describe.parameters()) {
    if (state.nonfinite_elements() == 0) continue;
    table.AddRow({{"non-finite elements", Color::kBad},
                  {FormatCount(++rank)},
                  {state.parameter().name()},
                  {FormatCount(state.nonfinite_elements())}});
  }
  return table;
}

VerbBody AttachRouting(CLI::App& command) {
  command.footer("Exit code 3 when nothing of the run goes to Muon.");
  return [](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const std::string run, TheRun(context));
    MUOND_ASSIGN_OR_RETURN(const v1::DescribeParametersReply reply,
                           context.admin.DescribeParameters(run));
    const bool muon = std::any_of(
        reply.parameters().begin(), reply.parameters().end(),
        [](const auto& state) { return state.routed().algorithm() == v1::ALGORITHM_MUON; });
    if (context.output == Output::kJson) {
      Json list = Json::array();
      for (const v1::ParameterState& state : reply.parameters()) {
        list.push_back(MessageToJson(state.routed()));
      }
      context.out << JsonText(list);
    } else {
      const TextTable table = RoutingTable(reply);
      context.out << (context.output == Output::kCsv ? table.Csv() : table.Render(context.color));
      if (!muon && context.output == Output::kTable) {
        context.out << Paint("nothing goes to Muon", Color::kBad, context.color) << "\n";
      }
    }
    return muon ? kOk : kUnhealthy;
  };
}

}  // namespace muond::cli
