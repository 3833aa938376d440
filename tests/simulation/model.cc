#include "tests/simulation/model.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/registry/plan.h"

namespace muond::simulation {
namespace {

// Cuts `blocks` into at most `parts` ranges, none of them empty.
std::vector<BlockRange> Cut(Random& random, int blocks, int parts) {
  std::vector<BlockRange> ranges;
  for (int first = 0; first < blocks;) {
    const int left = blocks - first;
    const bool last = static_cast<int>(ranges.size()) + 1 == parts;
    const int count = last ? left : static_cast<int>(random.Between(1, left));
    ranges.push_back({first, count});
    first += count;
  }
  return ranges;
}

void DealSlices(Random& random, ModelParameter& parameter, int world_size) {
  if (parameter.blocks == 0) return;
  parameter.slices.resize(world_size);
  if (parameter.replicated) {
    for (auto& slices : parameter.slices) {
      if (random.Chance(0.2)) continue;
      slices = Cut(random, parameter.blocks, static_cast<int>(random.Between(1, 2)));
    }
    // Somebody has it.
    auto& first = parameter.slices[random.Below(world_size)];
    if (first.empty()) first = {{0, parameter.blocks}};
    return;
  }
  std::vector<BlockRange> ranges = Cut(random, parameter.blocks, 4);
  for (const BlockRange& range : ranges) {
    parameter.slices[random.Below(world_size)].push_back(range);
  }
}

std::vector<int> DrawOwners(Random& random, int blocks, int daemons) {
  std::vector<int> owners;
  const bool whole = random.Chance(0.4);  // as a matrix is
  for (const BlockRange& range : Cut(random, blocks, whole ? 1 : daemons)) {
    owners.insert(owners.end(), range.count, static_cast<int>(random.Below(daemons)));
  }
  return owners;
}

// Parameters of the same sizes, half of them matrices, planned as the service does.
void PlanOwners(Random& random, Model& model) {
  RunSpec run;
  run.name = "simulation";
  run.world_size = model.world_size;
  run.groups.emplace_back().name = "g";
  for (const ModelParameter& parameter : model.parameters) {
    ParameterSpec spec;
    spec.name = parameter.name;
    spec.group = "g";
    spec.allow_empty = true;
    const bool matrix = parameter.blocks > 0 && random.Chance(0.5);
    spec.shape = matrix ? Dims{256 * parameter.blocks, 256} : Dims{65536 * parameter.blocks};
    if (parameter.blocks == 0) spec.shape = Dims{0};
    const ModelParameter& state = model.parameters[parameter.state];
    if (&state != &parameter) spec.shape = run.parameters[parameter.state].shape;
    spec.tie = "tie of " + state.name;
    run.parameters.push_back(spec);
  }
  const auto routing = RouteParameters(run);
  MUOND_CHECK(routing.ok(), routing.status().ToString());
  PlanOptions options;
  options.devices_per_daemon.assign(model.daemons, 1);
  const auto plan = MakePlan(run, *routing, options);
  MUOND_CHECK(plan.ok(), plan.status().ToString());
  for (const Shard& shard : plan->shards) {
    std::vector<int>& owners = model.owners[shard.parameter];
    for (std::int64_t block = shard.first / 65536; block * 65536 < shard.first + shard.elements;
         ++block) {
      owners[block] = plan->owners[shard.owner].place.daemon;
    }
  }
}

}  // namespace

bool Model::Reaches(int p, const BlockRange& slice, int daemon) const {
  const std::vector<int>& owner = owners[parameters[p].state];
  for (int block = slice.first; block < slice.first + slice.count; ++block) {
    if (owner[block] == daemon) return true;
  }
  return false;
}

StepLayout Model::WholeLayout() const {
  StepLayout layout;
  layout.world_size = world_size;
  for (const ModelParameter& parameter : parameters) {
    StepLayout::Parameter entry{parameter.name, parameter.replicated, parameter.state, {}};
    for (const auto& slices : parameter.slices) {
      entry.slices_of_rank.push_back(std::ssize(slices));
    }
    layout.parameters.push_back(std::move(entry));
  }
  return layout;
}

StepLayout Model::LayoutOf(int daemon, std::size_t count) const {
  StepLayout layout = WholeLayout();
  layout.parameters.resize(count);
  layout.self = daemon;
  layout.daemons.clear();
  for (int d = 0; d < daemons; ++d) layout.daemons.push_back(absl::StrFormat("daemon-%d", d));
  for (std::size_t p = 0; p < count; ++p) {
    StepLayout::Parameter& entry = layout.parameters[p];
    std::int64_t all = 0;
    std::int64_t here = 0;
    for (std::size_t rank = 0; rank < parameters[p].slices.size(); ++rank) {
      const auto& slices = parameters[p].slices[rank];
      for (std::size_t slice = 0; slice < slices.size(); ++slice) {
        ++all;
        if (!Reaches(static_cast<int>(p), slices[slice], daemon)) continue;
        ++here;
        entry.slices_here[static_cast<std::int64_t>(rank)].push_back(
            static_cast<std::int64_t>(slice));
      }
    }
    entry.here = here == all ? StepLayout::Here::kAll
                 : here > 0  ? StepLayout::Here::kSome
                             : StepLayout::Here::kNone;
    if (entry.here != StepLayout::Here::kSome) entry.slices_here.clear();
  }
  return layout;
}

Model MakeModel(Random& random, int world_size, int daemons, Planning planning) {
  Model model;
  model.world_size = world_size;
  model.daemons = daemons;
  // Many parameters: more offenders than a message names.
  const int count =
      static_cast<int>(random.Chance(0.1) ? random.Between(9, 12) : random.Between(1, 6));
  const int blocks_most = planning == Planning::kPlan ? 24 : 6;
  for (int p = 0; p < count; ++p) {
    ModelParameter parameter;
    parameter.state = p;
    parameter.replicated = random.Chance(0.35);
    parameter.blocks = random.Chance(0.05) ? 0 : static_cast<int>(random.Between(1, blocks_most));
    const int other = static_cast<int>(random.Below(count));
    const bool tied = other < p && random.Chance(0.2) && model.IsState(other) &&
                      model.parameters[other].blocks > 0;
    if (tied) {
      parameter.state = other;
      parameter.replicated = model.parameters[other].replicated;
      parameter.blocks = model.parameters[other].blocks;
    }
    parameter.name = absl::StrFormat("p%d", p);
    DealSlices(random, parameter, world_size);
    model.parameters.push_back(std::move(parameter));
    model.owners.emplace_back();
    if (!tied) model.owners.back() = DrawOwners(random, model.parameters[p].blocks, daemons);
  }
  if (planning == Planning::kPlan) PlanOwners(random, model);
  return model;
}

}  // namespace muond::simulation
