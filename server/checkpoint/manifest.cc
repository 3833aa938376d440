#include "server/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "server/checkpoint/safetensors.h"
#include "server/checkpoint/strict_json.h"

namespace muond::checkpoint {
namespace {

// `{"crc32c":"0123abcd",` and a line break.
constexpr char kFirstLine[] = "{\"crc32c\":\"%08x\",\n";
constexpr std::size_t kFirstLineBytes = 22;

constexpr SkipCause kCauses[] = {SkipCause::kNone, SkipCause::kOverflow, SkipCause::kStateOverflow,
                                 SkipCause::kNormThreshold, SkipCause::kTrainer};

// ---- Writing ----------------------------------------------------------------------------------

Json ToJson(const Hyperparameters& value) {
  return {{"lr", value.lr},       {"weight_decay", value.weight_decay},
          {"beta1", value.beta1}, {"momentum", value.momentum},
          {"beta2", value.beta2}, {"eps", value.eps}};
}

Json ToJson(const std::map<std::string, Hyperparameters>& groups) {
  Json json = Json::object();
  for (const auto& [name, value] : groups) json[name] = ToJson(value);
  return json;
}

Json ToJson(const StepOutcome& outcome) {
  return {{"step", outcome.step},
          {"applied", outcome.applied},
          {"cause", std::string(SkipCauseName(outcome.cause))},
          {"loss_scale", outcome.loss_scale},
          {"next_loss_scale", outcome.next_loss_scale},
          {"grad_norm", outcome.grad_norm},
          {"clip_coefficient", outcome.clip_coefficient},
          {"applied_steps", outcome.applied_steps},
          {"skipped_steps", outcome.skipped_steps},
          {"consecutive_skips", outcome.consecutive_skips},
          {"newton_schulz_calls", outcome.newton_schulz_calls},
          {"newton_schulz_fallbacks", outcome.newton_schulz_fallbacks},
          {"zero_inputs", outcome.zero_inputs},
          {"nonfinite_elements", outcome.nonfinite_elements},
          {"version", outcome.version},
          {"offenders", outcome.offenders}};
}

Json ToJson(const Parameter& parameter) {
  Json tensors = Json::object();
  for (const StateTensor& tensor : parameter.tensors) {
    Json pieces = Json::array();
    for (const Piece& piece : tensor.pieces) {
      pieces.push_back({{"file", piece.file},
                        {"key", piece.key},
                        {"first", piece.first},
                        {"elements", piece.elements}});
    }
    tensors[tensor.name] = {{"dtype", SafetensorsDtype(tensor.dtype)},
                            {"pieces", std::move(pieces)}};
  }
  return {{"name", parameter.name},
          {"shape", parameter.shape},
          {"algorithm", parameter.algorithm},
          {"momentum_form", parameter.momentum_form},
          {"matrices", parameter.matrices},
          {"tied", parameter.tied},
          {"t", parameter.t},
          {"tensors", std::move(tensors)}};
}

// ---- Reading ----------------------------------------------------------------------------------

absl::StatusOr<std::vector<std::string>> Texts(const Json& array, const std::string& where) {
  std::vector<std::string> texts;
  for (const Json& entry : array) {
    if (!entry.is_string()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: expected strings", where));
    }
    texts.push_back(entry.get<std::string>());
  }
  return texts;
}

absl::StatusOr<std::map<std::string, Hyperparameters>> GroupsFrom(const Json& json) {
  std::map<std::string, Hyperparameters> groups;
  for (const auto& [name, entry] : json.items()) {
    JsonReader reader(entry, absl::StrFormat("manifest: hyperparameters of \"%s\"", name));
    Hyperparameters& value = groups[name];
    value = {.lr = reader.Number("lr"),
             .weight_decay = reader.Number("weight_decay"),
             .momentum = reader.Number("momentum"),
             .beta1 = reader.Number("beta1"),
             .beta2 = reader.Number("beta2"),
             .eps = reader.Number("eps")};
    MUOND_RETURN_IF_ERROR(reader.status());
    MUOND_RETURN_IF_ERROR(ValidateHyperparameters(name, value));
  }
  return groups;
}

absl::StatusOr<StepOutcome> OutcomeFrom(const Json& json) {
  JsonReader reader(json, "manifest: last_outcome");
  StepOutcome outcome{.step = reader.Integer("step"), .applied = reader.Bool("applied")};
  const std::string cause = reader.Text("cause");
  outcome.loss_scale = reader.Number("loss_scale");
  outcome.next_loss_scale = reader.Number("next_loss_scale");
  outcome.grad_norm = reader.Number("grad_norm");
  outcome.clip_coefficient = reader.Number("clip_coefficient");
  outcome.applied_steps = reader.Integer("applied_steps");
  outcome.skipped_steps = reader.Integer("skipped_steps");
  outcome.consecutive_skips = reader.Integer("consecutive_skips");
  outcome.newton_schulz_calls = reader.Integer("newton_schulz_calls");
  outcome.newton_schulz_fallbacks = reader.Integer("newton_schulz_fallbacks");
  outcome.zero_inputs = reader.Integer("zero_inputs");
  outcome.nonfinite_elements = reader.Integer("nonfinite_elements");
  outcome.version = reader.Integer("version");
  const Json& offenders = reader.Array("offenders");
  MUOND_RETURN_IF_ERROR(reader.status());
  MUOND_ASSIGN_OR_RETURN(outcome.offenders, Texts(offenders, "manifest: offenders"));
  for (const SkipCause each : kCauses) {
    if (SkipCauseName(each) == cause) {
      outcome.cause = each;
      return outcome;
    }
  }
  return absl::InvalidArgumentError(absl::StrFormat("manifest: cause \"%s\" is none", cause));
}

absl::StatusOr<Control> ControlFrom(JsonReader& reader) {
  Control control{.generation = reader.Integer("generation"), .step = reader.Integer("step")};
  JsonReader scaler(reader.Object("loss_scaler"), "manifest: loss_scaler");
  control.scaler = {.scale = scaler.Number("scale"),
                    .good_steps = scaler.Integer("good_steps"),
                    .hysteresis_left = scaler.Integer("hysteresis_left"),
                    .overflows_at_minimum = scaler.Integer("overflows_at_minimum")};
  JsonReader counters(reader.Object("counters"), "manifest: counters");
  control.counters = {.applied_steps = counters.Integer("applied_steps"),
                      .skipped_steps = counters.Integer("skipped_steps"),
                      .consecutive_skips = counters.Integer("consecutive_skips")};
  JsonReader hyperparameters(reader.Object("hyperparameters"), "manifest: hyperparameters");
  const Json& muon = hyperparameters.Object("muon");
  const Json& adamw = hyperparameters.Object("adamw");
  const bool begun = !reader.Lacks("last_outcome");
  const Json& outcome = begun ? reader.Object("last_outcome") : muon;
  for (const JsonReader* part : {&reader, &scaler, &counters, &hyperparameters}) {
    MUOND_RETURN_IF_ERROR(part->status());
  }
  if (control.step < 0 || control.generation < 1 || !(control.scaler.scale > 0) ||
      !std::isfinite(control.scaler.scale)) {
    return absl::InvalidArgumentError("manifest: step, generation or loss scale can't be");
  }
  MUOND_ASSIGN_OR_RETURN(control.muon, GroupsFrom(muon));
  MUOND_ASSIGN_OR_RETURN(control.adamw, GroupsFrom(adamw));
  if (begun) {
    MUOND_ASSIGN_OR_RETURN(control.last_outcome, OutcomeFrom(outcome));
  }
  return control;
}

absl::StatusOr<StateTensor> TensorFrom(const std::string& name, const Json& json,
                                       const std::string& where) {
  JsonReader reader(json, where);
  StateTensor tensor{.name = name};
  const std::string dtype = reader.Text("dtype");
  const Json& pieces = reader.Array("pieces");
  MUOND_RETURN_IF_ERROR(reader.status());
  MUOND_ASSIGN_OR_RETURN(tensor.dtype, ParseSafetensorsDtype(dtype));
  for (const Json& entry : pieces) {
    JsonReader piece(entry, where);
    tensor.pieces.push_back({.file = piece.Text("file"),
                             .key = piece.Text("key"),
                             .first = piece.Integer("first"),
                             .elements = piece.Integer("elements")});
    MUOND_RETURN_IF_ERROR(piece.status());
  }
  return tensor;
}

absl::StatusOr<Parameter> ParameterFrom(const Json& json) {
  JsonReader reader(json, "manifest: parameters");
  Parameter parameter{.name = reader.Text("name")};
  const std::string where = absl::StrFormat("manifest: parameter \"%s\"", parameter.name);
  const Json& shape = reader.Array("shape");
  parameter.algorithm = reader.Text("algorithm");
  parameter.momentum_form = reader.Text("momentum_form");
  parameter.matrices = reader.Text("matrices");
  const Json& tied = reader.Array("tied");
  parameter.t = reader.Integer("t");
  const Json& tensors = reader.Object("tensors");
  MUOND_RETURN_IF_ERROR(reader.status());
  for (const Json& side : shape) {
    if (!side.is_number_unsigned()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: shape: no count", where));
    }
    parameter.shape.push_back(side.get<std::int64_t>());
  }
  MUOND_ASSIGN_OR_RETURN(parameter.tied, Texts(tied, where));
  for (const auto& [name, entry] : tensors.items()) {
    MUOND_ASSIGN_OR_RETURN(StateTensor tensor, TensorFrom(name, entry, where));
    parameter.tensors.push_back(std::move(tensor));
  }
  return parameter;
}

// ---- Judging ----------------------------------------------------------------------------------

absl::Status CheckPieces(const Parameter& parameter, const std::set<std::string>& files) {
  MUOND_ASSIGN_OR_RETURN(const std::int64_t elements, ElementCount(parameter.shape));
  for (const StateTensor& tensor : parameter.tensors) {
    const std::string where =
        absl::StrFormat("manifest: \"%s.%s\"", parameter.name, tensor.name);
    std::int64_t at = 0;
    for (const Piece& piece : tensor.pieces) {
      if (piece.first != at || piece.elements < 0 || piece.elements > elements - at) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "%s: pieces don't follow each other: expected element %d, got [%d, +%d)", where, at,
            piece.first, piece.elements));
      }
      if (files.count(piece.file) == 0) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s: file \"%s\" is not listed", where, piece.file));
      }
      at += piece.elements;
    }
    if (at != elements) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: pieces hold %d of %d elements", where, at, elements));
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const Manifest& manifest) {
  MUOND_RETURN_IF_ERROR(ValidateName("run", manifest.run));
  std::set<std::string> files, names;
  for (const FileRecord& file : manifest.files) {
    MUOND_RETURN_IF_ERROR(ValidateName("file", file.name));
    if (file.name == kManifestName || file.bytes < 0 || !files.insert(file.name).second) {
      return absl::InvalidArgumentError(
          absl::StrFormat("manifest: file \"%s\": twice, or what no file can be", file.name));
    }
  }
  for (const Parameter& parameter : manifest.parameters) {
    MUOND_RETURN_IF_ERROR(ValidateParameterName(parameter.name));
    if (!names.insert(parameter.name).second || parameter.t < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "manifest: parameter \"%s\": twice, or a negative t", parameter.name));
    }
    MUOND_RETURN_IF_ERROR(CheckPieces(parameter, files));
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> FromJson(const Json& json) {
  JsonReader reader(json, "manifest");
  if (reader.Text("format") != "muond-checkpoint" && reader.status().ok()) {
    return absl::InvalidArgumentError("manifest: format: expected \"muond-checkpoint\"");
  }
  const std::int64_t schema = reader.Integer("schema");
  MUOND_RETURN_IF_ERROR(reader.status());
  if (schema != kSchema) {
    return absl::UnimplementedError(absl::StrFormat(
        "manifest: schema %d: this program reads schema %d", schema, kSchema));
  }
  Manifest manifest{.run = reader.Text("run"),
                    .sequence = reader.Integer("sequence"),
                    .fingerprint = reader.Text("fingerprint"),
                    .saved_at = reader.Text("saved_at"),
                    .writer = reader.Text("writer"),
                    .daemons = reader.Integer("daemons")};
  const Json& parameters = reader.Array("parameters");
  const Json& files = reader.Array("files");
  MUOND_ASSIGN_OR_RETURN(manifest.control, ControlFrom(reader));
  for (const Json& entry : files) {
    JsonReader file(entry, "manifest: files");
    manifest.files.push_back({.name = file.Text("name"), .bytes = file.Integer("bytes")});
    const std::string crc = file.Text("crc32c");
    MUOND_RETURN_IF_ERROR(file.status());
    if (crc.size() != 8 || crc.find_first_not_of("0123456789abcdef") != std::string::npos) {
      return absl::InvalidArgumentError("manifest: files: crc32c: expected 8 hex digits");
    }
    manifest.files.back().crc32c = static_cast<std::uint32_t>(std::stoul(crc, nullptr, 16));
  }
  for (const Json& entry : parameters) {
    MUOND_ASSIGN_OR_RETURN(Parameter parameter, ParameterFrom(entry));
    manifest.parameters.push_back(std::move(parameter));
  }
  MUOND_RETURN_IF_ERROR(Check(manifest));
  return manifest;
}

}  // namespace

std::int64_t Manifest::Bytes() const {
  std::int64_t bytes = 0;
  for (const FileRecord& file : files) bytes += file.bytes;
  return bytes;
}

std::string ManifestText(const Manifest& manifest) {
  const Control& control = manifest.control;
  Json json = {
      {"format", "muond-checkpoint"},
      {"schema", kSchema},
      {"run", manifest.run},
      {"sequence", manifest.sequence},
      {"generation", control.generation},
      {"step", control.step},
      {"fingerprint", manifest.fingerprint},
      {"saved_at", manifest.saved_at},
      {"writer", manifest.writer},
      {"daemons", manifest.daemons},
      {"loss_scaler",
       {{"scale", control.scaler.scale},
        {"good_steps", control.scaler.good_steps},
        {"hysteresis_left", control.scaler.hysteresis_left},
        {"overflows_at_minimum", control.scaler.overflows_at_minimum}}},
      {"counters",
       {{"applied_steps", control.counters.applied_steps},
        {"skipped_steps", control.counters.skipped_steps},
        {"consecutive_skips", control.counters.consecutive_skips}}},
      {"hyperparameters", {{"muon", ToJson(control.muon)}, {"adamw", ToJson(control.adamw)}}},
      {"parameters", Json::array()},
      {"files", Json::array()}};
  if (control.last_outcome) json["last_outcome"] = ToJson(*control.last_outcome);
  for (const Parameter& parameter : manifest.parameters) {
    json["parameters"].push_back(ToJson(parameter));
  }
  for (const FileRecord& file : manifest.files) {
    json["files"].push_back({{"name", file.name},
                             {"bytes", file.bytes},
                             {"crc32c", absl::StrFormat("%08x", file.crc32c)}});
  }
  const std::string rest = json.dump(1).substr(1) + "\n";
  return absl::StrFormat(kFirstLine, Crc32c(rest.data(), rest.size())) + rest;
}

absl::StatusOr<Manifest> ParseManifest(const std::string& text) {
  if (text.size() <= kFirstLineBytes) return absl::DataLossError("manifest: is cut off");
  const std::uint32_t crc =
      Crc32c(text.data() + kFirstLineBytes, text.size() - kFirstLineBytes);
  if (text.compare(0, kFirstLineBytes, absl::StrFormat(kFirstLine, crc)) != 0) {
    return absl::DataLossError(
        absl::StrFormat("manifest: its checksum is wrong, expected crc32c %08x", crc));
  }
  MUOND_ASSIGN_OR_RETURN(const Json json, ParseStrictJson(text));
  return FromJson(json);
}

}  // namespace muond::checkpoint
