#include "tests/e2e/trainer/model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "proto/check.h"

namespace muond::test_trainer {
namespace {

enum class Cut { kFlat, kRows, kCols, kWhole };

std::uint64_t Mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// In [-1, 1), a multiple of 2^-23.
float Noise(std::uint64_t key, std::int64_t element) {
  const std::uint64_t bits = Mix(key ^ Mix(static_cast<std::uint64_t>(element)));
  return static_cast<float>(static_cast<std::int64_t>(bits) >> 40) / 8388608.0f;
}

std::uint64_t Key(std::uint64_t seed, std::int64_t step, int parameter, std::int64_t rank) {
  return Mix(Mix(Mix(seed * 3 + 1) + static_cast<std::uint64_t>(step + 1)) +
             static_cast<std::uint64_t>(parameter) * 1009 + static_cast<std::uint64_t>(rank + 1));
}

ParameterSpec Tensor(const std::string& name, Dims shape, Role role) {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.kind = shape.size() == 1 ? Kind::kVector : Kind::kMatrix;
  parameter.shape = std::move(shape);
  parameter.group = role == Role::kHidden ? "muon" : "adamw";
  parameter.role = role;
  return parameter;
}

std::vector<ParameterSpec> Mixed() {
  std::vector<ParameterSpec> parameters = {
      Tensor("rows", {96, 64}, Role::kHidden), Tensor("cols", {64, 96}, Role::kHidden),
      Tensor("flat", {72, 40}, Role::kHidden), Tensor("down", {40, 72}, Role::kHidden),
      Tensor("norm", {96}, Role::kNorm),       Tensor("embedding", {1600, 128}, Role::kEmbedding)};
  parameters[4].replicated = true;
  return parameters;
}

absl::StatusOr<std::vector<ParameterSpec>> ParametersOf(const std::string& kind) {
  if (kind == "mixed") return Mixed();
  if (kind == "one") return std::vector<ParameterSpec>{Tensor("w", {16, 16}, Role::kHidden)};
  const std::vector<std::string> parts = absl::StrSplit(kind, absl::ByAnyChar(":,"));
  std::int64_t count = 0, size = 0;
  if (parts.size() != 3 || parts[0] != "square" || !absl::SimpleAtoi(parts[1], &count) ||
      !absl::SimpleAtoi(parts[2], &size)) {
    return absl::InvalidArgumentError(absl::StrFormat("model \"%s\": there is no such kind", kind));
  }
  std::vector<ParameterSpec> parameters;
  for (std::int64_t i = 0; i < count; ++i) {
    parameters.push_back(Tensor(absl::StrFormat("w%d", i), {size, size}, Role::kHidden));
  }
  return parameters;
}

Cut CutOf(const ParameterSpec& parameter) {
  if (parameter.replicated) return Cut::kWhole;
  if (parameter.name == "rows") return Cut::kRows;
  if (parameter.name == "cols") return Cut::kCols;
  return Cut::kFlat;
}

Box BoxOf(const ParameterSpec& parameter, std::int64_t rank, std::int64_t world_size) {
  const Dims& shape = *parameter.shape;
  const auto part = [&](std::int64_t size) {
    const std::int64_t begin = size * rank / world_size;
    return std::pair(begin, size * (rank + 1) / world_size - begin);
  };
  Box box = WholeBox(shape);
  switch (CutOf(parameter)) {
    case Cut::kWhole:
      break;
    case Cut::kRows:
      std::tie(box.offset[0], box.size[0]) = part(shape[0]);
      break;
    case Cut::kCols:
      std::tie(box.offset[1], box.size[1]) = part(shape[1]);
      break;
    case Cut::kFlat:
      const auto [begin, size] = part(box.Elements());
      box = {{begin}, {size}, true};
  }
  return box;
}

// Calls visit(element of the tensor, element of the box) for every element of the slice.
template <typename Visitor>
void ForEachElement(const Slice& slice, const Visitor& visit) {
  ForEachRun(slice.box, slice.shape, 0, slice.box.Elements(),
             [&](std::int64_t tensor, std::int64_t box, std::int64_t count) {
               for (std::int64_t i = 0; i < count; ++i) visit(tensor + i, box + i);
             });
}

}  // namespace

absl::StatusOr<RunSpec> MakeRun(const ModelOptions& options) {
  RunSpec run;
  run.name = options.run;
  run.world_size = options.world_size;
  MUOND_ASSIGN_OR_RETURN(run.parameters, ParametersOf(options.kind));
  for (const auto& [name, algorithm] :
       {std::pair{"muon", Algorithm::kMuon}, std::pair{"adamw", Algorithm::kAdamW}}) {
    const auto uses = [name = std::string(name)](const ParameterSpec& parameter) {
      return parameter.group == name;
    };
    if (std::none_of(run.parameters.begin(), run.parameters.end(), uses)) continue;
    GroupSpec group;
    group.name = name;
    group.algorithm = algorithm;
    group.muon.lr = group.adamw.lr = 0.05;
    run.groups.push_back(group);
  }
  run.loss_scale = {.mode = LossScaleMode::kDynamic, .initial = 1024, .window = 4};
  run.max_grad_norm = 1;
  return run;
}

std::vector<Slice> MakeSlices(const RunSpec& run, const ModelOptions& options, std::int64_t rank) {
  std::vector<Slice> slices;
  for (int i = 0; i < std::ssize(run.parameters); ++i) {
    const ParameterSpec& parameter = run.parameters[i];
    Slice slice{.parameter = parameter.name, .parameter_index = i};
    slice.shape = *parameter.shape;
    slice.box = BoxOf(parameter, rank, options.world_size);
    slice.values.resize(slice.box.Elements());
    slice.gradient.resize(slice.box.Elements());
    const std::uint64_t key = Key(options.seed, -1, i, -1);
    ForEachElement(slice, [&](std::int64_t tensor, std::int64_t box) {
      slice.values[box] = Noise(key, tensor);
    });
    slices.push_back(std::move(slice));
  }
  return slices;
}

RankSlices BoxesOf(const std::vector<Slice>& slices) {
  RankSlices boxes;
  for (const Slice& slice : slices) boxes[slice.parameter].push_back(slice.box);
  return boxes;
}

bool Overflows(const ModelOptions& options, std::int64_t step) {
  if (options.skip_every < 1) return false;
  const std::int64_t among = options.skip_every;
  return Mix(options.seed * 31 + step / among) % among == static_cast<std::uint64_t>(step % among);
}

void MakeGradients(const RunSpec& run, const ModelOptions& options, std::int64_t rank,
                   std::int64_t step, double loss_scale, std::vector<Slice>& slices) {
  const auto scale = static_cast<float>(loss_scale);
  for (Slice& slice : slices) {
    const bool replicated = run.parameters[slice.parameter_index].replicated;
    const std::uint64_t key =
        Key(options.seed, step, slice.parameter_index, replicated ? rank : -1);
    ForEachElement(slice, [&](std::int64_t tensor, std::int64_t box) {
      slice.gradient[box] = (Noise(key, tensor) + 0.5f * slice.values[box]) * scale;
    });
  }
  if (!Overflows(options, step) || rank != step % options.world_size) return;
  Slice& spoiled = slices[static_cast<std::size_t>(step) % slices.size()];
  if (!spoiled.gradient.empty()) {
    spoiled.gradient.back() = std::numeric_limits<float>::infinity();
  }
}

}  // namespace muond::test_trainer
