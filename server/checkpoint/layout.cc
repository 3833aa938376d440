#include "server/checkpoint/layout.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "xxhash.h"

namespace muond::checkpoint {
namespace {

constexpr std::size_t kMatricesTextMax = 512;

std::string Hash(const std::string& bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

absl::Status Differs(const std::string& name, const char* what, const std::string& there,
                     const std::string& here) {
  return absl::FailedPreconditionError(
      absl::StrFormat("parameter \"%s\": restore: %s: the checkpoint has %s, the run has %s", name,
                      what, there.empty() ? "none" : there, here.empty() ? "none" : here));
}

std::string TensorsText(const Parameter& parameter) {
  return absl::StrJoin(parameter.tensors, ", ", [](std::string* out, const StateTensor& tensor) {
    out->append(tensor.name + " " + std::string(kernels::DtypeName(tensor.dtype)));
  });
}

absl::Status CheckParameter(const Parameter& there, const Parameter& here, bool allow_relayout) {
  const std::string& name = here.name;
  if (there.shape != here.shape) {
    return Differs(name, "shape", DimsToString(there.shape), DimsToString(here.shape));
  }
  if (there.algorithm != here.algorithm) {
    return Differs(name, "algorithm", there.algorithm, here.algorithm);
  }
  if (there.momentum_form != here.momentum_form) {
    return Differs(name, "momentum form", there.momentum_form, here.momentum_form);
  }
  if (there.matrices != here.matrices && !allow_relayout) {
    return Differs(name, "matrices (kind and split)", there.matrices, here.matrices);
  }
  if (there.tied != here.tied) {
    return Differs(name, "tied names", absl::StrJoin(there.tied, ", "),
                   absl::StrJoin(here.tied, ", "));
  }
  if (TensorsText(there) != TensorsText(here)) {
    return Differs(name, "state tensors", TensorsText(there), TensorsText(here));
  }
  return absl::OkStatus();
}

}  // namespace

std::string MatricesText(const std::vector<MatrixBlock>& matrices) {
  std::string text;
  for (const MatrixBlock& block : matrices) {
    text += absl::StrFormat("%s%dx%d @ ", text.empty() ? "" : "; ", block.rows, block.cols);
    for (const RowRange& range : block.ranges) {
      text += absl::StrFormat("%s%d+%d", &range == &block.ranges[0] ? "" : ",", range.begin,
                              range.count);
    }
  }
  if (text.size() <= kMatricesTextMax) return text;
  return absl::StrFormat("%d matrices, first %dx%d, hash %s", matrices.size(), matrices[0].rows,
                         matrices[0].cols, Hash(text));
}

std::vector<Parameter> LayoutOf(const RunSpec& spec, const Routing& routing) {
  std::map<std::string, const GroupSpec*> groups;
  for (const GroupSpec& group : spec.groups) groups[group.name] = &group;
  std::vector<Parameter> layout;
  std::map<int, std::vector<std::string>> tied;
  for (int i = 0; i < std::ssize(spec.parameters); ++i) {
    const int state = routing.parameters[i].state;
    if (state != i) tied[state].push_back(spec.parameters[i].name);
  }
  for (int i = 0; i < std::ssize(spec.parameters); ++i) {
    const RoutedParameter& routed = routing.parameters[i];
    if (routed.state != i) continue;
    const bool muon = routed.algorithm == Algorithm::kMuon;
    Parameter parameter{.name = spec.parameters[i].name,
                        .shape = *spec.parameters[i].shape,
                        .algorithm = std::string(AlgorithmName(routed.algorithm)),
                        .tied = tied[i]};
    std::sort(parameter.tied.begin(), parameter.tied.end());
    if (muon) {
      const GroupSpec& group = *groups.at(spec.parameters[i].group);
      parameter.momentum_form = group.momentum_sum_form ? "sum" : "ema";
      parameter.matrices = MatricesText(routed.matrices);
      parameter.tensors = {{.name = "master"},
                           {.name = "momentum", .dtype = group.momentum_dtype}};
    } else {
      parameter.tensors = {{.name = "exp_avg"}, {.name = "exp_avg_sq"}, {.name = "master"}};
    }
    layout.push_back(std::move(parameter));
  }
  std::sort(layout.begin(), layout.end(),
            [](const Parameter& a, const Parameter& b) { return a.name < b.name; });
  return layout;
}

std::string Fingerprint(const std::vector<Parameter>& layout) {
  std::string text;
  for (const Parameter& parameter : layout) {
    std::string momentum = parameter.momentum_form;
    for (const StateTensor& tensor : parameter.tensors) {
      // fp32 goes without saying.
      if (tensor.name == "momentum" && tensor.dtype != Dtype::kF32) {
        absl::StrAppend(&momentum, " ", std::string(kernels::DtypeName(tensor.dtype)));
      }
    }
    text += absl::StrFormat("%s|%s|%s|%s|%s|%s\n", parameter.name, DimsToString(parameter.shape),
                            parameter.algorithm, momentum, parameter.matrices,
                            absl::StrJoin(parameter.tied, ","));
  }
  return Hash(text);
}

absl::Status CheckLayout(const Manifest& manifest, const std::vector<Parameter>& run,
                         bool allow_relayout) {
  // One that was imported may have none: every field is compared below in any case.
  if (!manifest.fingerprint.empty() && manifest.fingerprint != Fingerprint(manifest.parameters)) {
    return absl::DataLossError(absl::StrFormat(
        "restore: the manifest's fingerprint \"%s\" is not that of its parameters, \"%s\"",
        manifest.fingerprint, Fingerprint(manifest.parameters)));
  }
  std::map<std::string, const Parameter*> there;
  for (const Parameter& parameter : manifest.parameters) there[parameter.name] = &parameter;
  for (const Parameter& here : run) {
    const auto found = there.find(here.name);
    if (found == there.end()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "parameter \"%s\": restore: the checkpoint lacks it", here.name));
    }
    MUOND_RETURN_IF_ERROR(CheckParameter(*found->second, here, allow_relayout));
    there.erase(found);
  }
  if (there.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "parameter \"%s\": restore: the checkpoint has it, the run does not", there.begin()->first));
}

}  // namespace muond::checkpoint
