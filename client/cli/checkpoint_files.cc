#include "client/cli/checkpoint_files.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <ostream>

#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "client/cli/message_json.h"
#include "client/cli/text_table.h"
#include "proto/check.h"
#include "proto/values.h"
#include "server/checkpoint/part.h"
#include "server/checkpoint/store.h"

namespace muond::cli {
namespace {

using checkpoint::FileSystem;
using checkpoint::Listed;
using checkpoint::Manifest;
using checkpoint::Store;

std::shared_ptr<std::string> AddDirectory(CLI::App& command) {
  auto directory = std::make_shared<std::string>();
  command.add_option("directory", *directory, "the daemons' --checkpoint-dir")->required();
  return directory;
}

// The runs with a directory there; the one of --run where it was given.
absl::StatusOr<std::vector<std::string>> RunsIn(FileSystem& files, const VerbContext& context) {
  if (!context.run.empty()) {
    MUOND_RETURN_IF_ERROR(ValidateName("run", context.run));
    return std::vector<std::string>{context.run};
  }
  MUOND_ASSIGN_OR_RETURN(const auto entries, files.List({}));
  std::vector<std::string> runs;
  for (const auto& entry : entries) {
    if (entry.directory) runs.push_back(entry.name);
  }
  return runs;
}

absl::StatusOr<std::string> OneRun(FileSystem& files, const VerbContext& context) {
  MUOND_ASSIGN_OR_RETURN(const auto runs, RunsIn(files, context));
  if (runs.size() == 1) return runs[0];
  return absl::FailedPreconditionError(absl::StrFormat(
      "the directory has %d runs: choose one with --run", runs.size()));
}

std::string StatusText(const absl::Status& status) {
  return status.ok() ? "complete" : std::string(status.message());
}

struct Row {
  std::string run;
  Listed listed;
};

absl::StatusOr<std::vector<Row>> RowsOf(FileSystem& files, const VerbContext& context) {
  MUOND_ASSIGN_OR_RETURN(const auto runs, RunsIn(files, context));
  std::vector<Row> rows;
  for (const std::string& run : runs) {
    MUOND_ASSIGN_OR_RETURN(auto listed, Store(files, run).List());
    for (Listed& one : listed) rows.push_back({run, std::move(one)});
  }
  return rows;
}

ExitCode Print(VerbContext& context, const std::vector<Row>& rows) {
  bool well = true;
  Json json = Json::array();
  TextTable table;
  for (const char* name : {"RUN", "CHECKPOINT"}) table.AddColumn(name, Align::kLeft);
  for (const char* name : {"STEP", "SEQUENCE", "DAEMONS", "BYTES"}) {
    table.AddColumn(name, Align::kRight);
  }
  for (const char* name : {"SAVED", "STATUS"}) table.AddColumn(name, Align::kLeft);
  for (const auto& [run, one] : rows) {
    well = well && one.status.ok();
    const Manifest manifest = one.manifest.value_or(Manifest{});
    json.push_back({{"run", run},
                    {"name", one.name},
                    {"step", *checkpoint::StepOfName(one.name)},
                    {"sequence", manifest.sequence},
                    {"daemons", manifest.daemons},
                    {"bytes", manifest.Bytes()},
                    {"saved_at", manifest.saved_at},
                    {"complete", one.status.ok()},
                    {"status", StatusText(one.status)}});
    table.AddRow({{run},
                  {one.name},
                  {FormatCount(*checkpoint::StepOfName(one.name))},
                  {one.manifest ? FormatCount(manifest.sequence) : "?"},
                  {one.manifest ? FormatCount(manifest.daemons) : "?"},
                  {one.manifest ? FormatBytes(manifest.Bytes()) : "?"},
                  {manifest.saved_at},
                  {StatusText(one.status), one.status.ok() ? Color::kGood : Color::kBad}});
  }
  context.out << (context.output == Output::kJson ? JsonText(json) : table.Render(context.color));
  return well ? kOk : kUnhealthy;
}

Json ControlJson(const Manifest& manifest) {
  const checkpoint::Control& control = manifest.control;
  return {{"run", manifest.run},
          {"step", control.step},
          {"sequence", manifest.sequence},
          {"generation", control.generation},
          {"saved_at", manifest.saved_at},
          {"writer", manifest.writer},
          {"daemons", manifest.daemons},
          {"files", manifest.files.size()},
          {"bytes", manifest.Bytes()},
          {"fingerprint", manifest.fingerprint},
          {"loss_scale", control.scaler.scale},
          {"good_steps", control.scaler.good_steps},
          {"hysteresis_left", control.scaler.hysteresis_left},
          {"applied_steps", control.counters.applied_steps},
          {"skipped_steps", control.counters.skipped_steps}};
}

std::int64_t Elements(const Dims& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t side : shape) elements *= side;
  return elements;
}

// One whole tensor of a checkpoint, widened; checksums are compared on the way.
absl::StatusOr<std::vector<float>> ReadTensor(FileSystem& files, const checkpoint::Path& path,
                                              const Manifest& manifest,
                                              const checkpoint::Parameter& parameter,
                                              const checkpoint::StateTensor& tensor) {
  const std::int64_t elements = Elements(parameter.shape);
  std::vector<char> bytes(elements * DtypeBytes(tensor.dtype));
  const checkpoint::ShardSink sink{
      parameter.name, 0, elements, {{tensor.name, tensor.dtype, bytes.data()}}};
  MUOND_RETURN_IF_ERROR(ReadShards(files, path, manifest, {&sink, 1}));
  std::vector<float> values(elements);
  for (std::int64_t i = 0; i < elements; ++i) {
    std::uint16_t half = 0;
    if (tensor.dtype == Dtype::kF32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      std::memcpy(&half, &bytes[2 * i], 2);
      values[i] = tensor.dtype == Dtype::kBF16 ? kernels::BF16ToFloat(half)
                                               : kernels::F16ToFloat(half);
    }
  }
  return values;
}

// "" when equal.
std::string Difference(const std::vector<float>& a, const std::vector<float>& b) {
  std::int64_t differing = 0;
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) == 0) continue;
    ++differing;
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  if (differing == 0) return "";
  return absl::StrFormat("%d of %d elements, by %s at most", differing, a.size(),
                         FormatNumber(largest));
}

// What is different, by name: "loss_scale" -> "256 | 512".
using Differences = std::vector<std::pair<std::string, std::string>>;

absl::StatusOr<Differences> Compare(FileSystem& files, const Store& store, const std::string& a,
                                    const std::string& b) {
  MUOND_ASSIGN_OR_RETURN(const Manifest left, store.ReadManifest(a));
  MUOND_ASSIGN_OR_RETURN(const Manifest right, store.ReadManifest(b));
  Differences differences;
  const Json here = ControlJson(left), there = ControlJson(right);
  for (const auto& [key, value] : here.items()) {
    if (value != there[key]) {
      differences.push_back({key, value.dump() + " | " + there[key].dump()});
    }
  }
  std::map<std::string, const checkpoint::Parameter*> others;
  for (const auto& parameter : right.parameters) others[parameter.name] = &parameter;
  for (const auto& parameter : left.parameters) {
    const auto found = others.find(parameter.name);
    if (found == others.end() || found->second->shape != parameter.shape ||
        found->second->tensors.size() != parameter.tensors.size()) {
      differences.push_back({parameter.name, "another shape or state, or only in the first"});
      if (found != others.end()) others.erase(found);
      continue;
    }
    const checkpoint::Parameter& other = *found->second;
    if (other.t != parameter.t) {
      differences.push_back(
          {parameter.name + ".t", absl::StrFormat("%d | %d", parameter.t, other.t)});
    }
    for (std::size_t i = 0; i < parameter.tensors.size(); ++i) {
      MUOND_ASSIGN_OR_RETURN(const auto x, ReadTensor(files, store.PathOf(a), left, parameter,
                                                      parameter.tensors[i]));
      MUOND_ASSIGN_OR_RETURN(
          const auto y, ReadTensor(files, store.PathOf(b), right, other, other.tensors[i]));
      const std::string tensor = parameter.name + "." + parameter.tensors[i].name;
      if (parameter.tensors[i].dtype != other.tensors[i].dtype) {
        differences.push_back(
            {tensor + " dtype",
             absl::StrFormat("%s | %s", kernels::DtypeName(parameter.tensors[i].dtype),
                             kernels::DtypeName(other.tensors[i].dtype))});
      }
      if (std::string text = Difference(x, y); !text.empty()) {
        differences.push_back({tensor, text});
      }
    }
    others.erase(found);
  }
  for (const auto& [name, parameter] : others) differences.push_back({name, "only in the second"});
  return differences;
}

}  // namespace

VerbBody AttachCheckpointList(CLI::App& command) {
  const auto directory = AddDirectory(command);
  return [directory](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const auto files, checkpoint::OpenFileSystem(*directory));
    MUOND_ASSIGN_OR_RETURN(const auto rows, RowsOf(*files, context));
    Print(context, rows);
    return kOk;
  };
}

VerbBody AttachCheckpointVerify(CLI::App& command) {
  const auto directory = AddDirectory(command);
  return [directory](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const auto files, checkpoint::OpenFileSystem(*directory));
    MUOND_ASSIGN_OR_RETURN(auto rows, RowsOf(*files, context));
    for (Row& row : rows) {
      if (!row.listed.status.ok()) continue;
      row.listed.status =
          checkpoint::Verify(*files, {row.run, row.listed.name}, *row.listed.manifest);
    }
    return Print(context, rows);
  };
}

VerbBody AttachCheckpointShow(CLI::App& command) {
  const auto directory = AddDirectory(command);
  auto name = std::make_shared<std::string>();
  command.add_option("name", *name, "the checkpoint, as ckpt-1200")->required();
  return [directory, name](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const auto files, checkpoint::OpenFileSystem(*directory));
    MUOND_ASSIGN_OR_RETURN(const std::string run, OneRun(*files, context));
    MUOND_ASSIGN_OR_RETURN(const Manifest manifest, Store(*files, run).ReadManifest(*name));
    Json json = ControlJson(manifest);
    std::string text;
    for (const auto& [key, value] : json.items()) {
      text += absl::StrFormat("%-16s %s\n", key,
                              value.is_string() ? value.get<std::string>() : value.dump());
    }
    TextTable table;
    for (const char* column : {"PARAMETER", "SHAPE", "ALGORITHM", "MATRICES", "STATE"}) {
      table.AddColumn(column, Align::kLeft);
    }
    for (const char* column : {"T", "PIECES"}) table.AddColumn(column, Align::kRight);
    json["parameters"] = Json::array();
    for (const checkpoint::Parameter& parameter : manifest.parameters) {
      std::string state;
      Json dtypes = Json::object();
      std::size_t pieces = 0;
      for (const auto& tensor : parameter.tensors) {
        state += absl::StrFormat("%s%s %s", state.empty() ? "" : ", ", tensor.name,
                                 std::string(kernels::DtypeName(tensor.dtype)));
        dtypes[tensor.name] = kernels::DtypeName(tensor.dtype);
        pieces += tensor.pieces.size();
      }
      table.AddRow({{parameter.name},
                    {DimsToString(parameter.shape)},
                    {parameter.algorithm},
                    {parameter.matrices.empty() ? "-" : parameter.matrices},
                    {state},
                    {FormatCount(parameter.t)},
                    {FormatCount(static_cast<std::int64_t>(pieces))}});
      json["parameters"].push_back({{"name", parameter.name},
                                    {"shape", parameter.shape},
                                    {"algorithm", parameter.algorithm},
                                    {"momentum_form", parameter.momentum_form},
                                    {"matrices", parameter.matrices},
                                    {"dtypes", std::move(dtypes)},
                                    {"t", parameter.t},
                                    {"pieces", pieces}});
    }
    context.out << (context.output == Output::kJson ? JsonText(json)
                                                    : text + "\n" + table.Render(context.color));
    return kOk;
  };
}

VerbBody AttachCheckpointDiff(CLI::App& command) {
  const auto directory = AddDirectory(command);
  auto names = std::make_shared<std::vector<std::string>>();
  command.add_option("names", *names, "the two checkpoints")->expected(2)->required();
  return [directory, names](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const auto files, checkpoint::OpenFileSystem(*directory));
    MUOND_ASSIGN_OR_RETURN(const std::string run, OneRun(*files, context));
    MUOND_ASSIGN_OR_RETURN(const Differences differences,
                           Compare(*files, Store(*files, run), (*names)[0], (*names)[1]));
    Json json = Json::object();
    TextTable table;
    for (const char* column : {"WHAT", "DIFFERENCE"}) table.AddColumn(column, Align::kLeft);
    for (const auto& [what, text] : differences) {
      json[what] = text;
      table.AddRow({{what}, {text}});
    }
    context.out << (context.output == Output::kJson ? JsonText(json) : table.Render(context.color));
    return differences.empty() ? kOk : kUnhealthy;
  };
}

VerbBody AttachCheckpointPrune(CLI::App& command) {
  const auto directory = AddDirectory(command);
  auto keep = std::make_shared<std::int64_t>(0);
  command.add_option("--keep", *keep, "how many complete ones stay")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  command.footer("Also removes what broken-off saves left behind: not while a daemon saves there.");
  return [directory, keep](VerbContext& context) -> absl::StatusOr<ExitCode> {
    MUOND_ASSIGN_OR_RETURN(const auto files, checkpoint::OpenFileSystem(*directory));
    MUOND_ASSIGN_OR_RETURN(const std::string run, OneRun(*files, context));
    MUOND_ASSIGN_OR_RETURN(const auto removed, Store(*files, run).Prune(*keep));
    if (context.output == Output::kJson) {
      context.out << JsonText(Json(removed));
    } else {
      for (const std::string& name : removed) context.out << "removed " << name << "\n";
      if (removed.empty()) context.out << "nothing to remove\n";
    }
    return kOk;
  };
}

}  // namespace muond::cli
