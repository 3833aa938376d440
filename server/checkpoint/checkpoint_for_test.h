// A small run whose state is known, and checkpoints of it by any number of daemons.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/check.h"
#include "server/checkpoint/layout.h"
#include "server/checkpoint/part.h"
#include "server/checkpoint/store.h"
#include "server/registry/run_for_test.h"

namespace muond::checkpoint {

// A matrix for Muon, a norm for AdamW and an embedding that AdamW's owners may cut.
inline RunSpec SmallRun() {
  return RunOf({Tensor("blk.0.wq", {4, 3}, Role::kHidden), Tensor("blk.0.norm", {3}, Role::kNorm),
                Tensor("embed", {5, 4}, Role::kEmbedding)});
}

inline std::vector<Parameter> SmallLayout() {
  const RunSpec spec = SmallRun();
  const auto routing = RouteParameters(spec);
  MUOND_CHECK(routing.ok(), routing.status().ToString());
  return LayoutOf(spec, *routing);
}

// Of one tensor at one step: element i has a value of its own.
inline float StateValue(const std::string& tensor, std::int64_t step, std::int64_t i) {
  const auto base = step * 1000 + static_cast<std::int64_t>(tensor.size()) * 100;
  return static_cast<float>(base + i) + 0.1f;
}

inline std::int64_t CountElements(const Dims& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t side : shape) elements *= side;
  return elements;
}

// What one daemon of `daemons` owns: the elements of each parameter that are its share, whatever
// the rows. `memory` keeps them.
struct OwnedState {
  std::vector<ShardView> shards;
  std::vector<std::vector<float>> memory;
};
inline OwnedState StateOf(int daemon, int daemons, std::int64_t step) {
  OwnedState state;
  for (const Parameter& parameter : SmallLayout()) {
    const std::int64_t elements = CountElements(parameter.shape);
    const std::int64_t first = elements * daemon / daemons;
    const std::int64_t count = elements * (daemon + 1) / daemons - first;
    if (count == 0) continue;
    ShardView shard{parameter.name, parameter.shape, first, count, step, {}};
    for (const StateTensor& tensor : parameter.tensors) {
      std::vector<float> values;
      for (std::int64_t i = first; i < first + count; ++i) {
        values.push_back(StateValue(parameter.name + tensor.name, step, i));
      }
      state.memory.push_back(std::move(values));
      shard.tensors.push_back({tensor.name, Dtype::kF32, state.memory.back().data()});
    }
    state.shards.push_back(std::move(shard));
  }
  return state;
}

inline Control ControlOf(std::int64_t step) {
  Control control{.generation = 2, .step = step};
  control.scaler = {.scale = 32768, .good_steps = step, .hysteresis_left = 2};
  control.counters = {.applied_steps = step};
  control.muon["g"] = {.lr = 0.1 / 3};
  control.adamw["g"] = {.lr = 1e-4};
  if (step > 0) control.last_outcome = StepOutcome{.step = step - 1, .applied = true};
  return control;
}

// A whole save, as the daemons of a run do it together: the checkpoint's name.
inline absl::StatusOr<std::string> Save(FileSystem& files, std::int64_t step, int daemons = 2,
                                        std::int64_t keep = 2, const PartLimits& limits = {}) {
  Store store(files, "r");
  const std::string id = "x" + std::to_string(step);
  MUOND_ASSIGN_OR_RETURN(const std::string saving, store.Begin(step, id));
  std::vector<Part> parts;
  for (int daemon = 0; daemon < daemons; ++daemon) {
    const OwnedState state = StateOf(daemon, daemons, step);
    MUOND_ASSIGN_OR_RETURN(
        Part part, WritePart(files, store.PathOf(saving), daemon, state.shards, limits));
    parts.push_back(std::move(part));
  }
  MUOND_ASSIGN_OR_RETURN(Manifest manifest, Assemble(SmallLayout(), parts));
  manifest.run = "r";
  manifest.control = ControlOf(step);
  manifest.fingerprint = Fingerprint(SmallLayout());
  manifest.saved_at = "2026-11-30T12:00:00Z";
  manifest.writer = "muond 0.1.0";
  manifest.daemons = daemons;
  MUOND_ASSIGN_OR_RETURN(const std::string name, store.Publish(saving, std::move(manifest)));
  MUOND_RETURN_IF_ERROR(store.Prune(keep).status());
  return name;
}

// Reads what `daemon` of `daemons` would own and compares it with the state of `step`.
inline absl::Status LoadAndCompare(FileSystem& files, const Path& path, const Manifest& manifest,
                                   int daemon = 0, int daemons = 1) {
  const OwnedState expected = StateOf(daemon, daemons, manifest.control.step);
  std::vector<std::vector<float>> memory;
  std::vector<ShardSink> sinks;
  for (const ShardView& shard : expected.shards) {
    ShardSink sink{shard.parameter, shard.first, shard.elements, {}};
    for (const TensorView& tensor : shard.tensors) {
      memory.emplace_back(shard.elements, -1.0f);
      sink.tensors.push_back({tensor.name, tensor.dtype, memory.back().data()});
    }
    sinks.push_back(std::move(sink));
  }
  MUOND_RETURN_IF_ERROR(ReadShards(files, path, manifest, sinks));
  return memory == expected.memory ? absl::OkStatus()
                                   : absl::InternalError("the state is another");
}

}  // namespace muond::checkpoint
