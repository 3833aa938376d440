#include "server/run/registry_layout.h"

#include <algorithm>

namespace muond {
namespace {

StepLayout::Here HereOf(const Registry& registry, int parameter) {
  const std::int64_t here = registry.ElementsHere(parameter);
  if (here == registry.routing().parameters[parameter].elements) return StepLayout::Here::kAll;
  return here == 0 ? StepLayout::Here::kNone : StepLayout::Here::kSome;
}

void ListSlicesHere(const Registry& registry, int p, StepLayout::Parameter& parameter) {
  const Dims& shape = *registry.spec().parameters[p].shape;
  for (std::int64_t rank = 0; rank < std::ssize(parameter.slices_of_rank); ++rank) {
    const std::vector<Box>& boxes = registry.SlicesOf(p, rank);
    for (std::int64_t slice = 0; slice < std::ssize(boxes); ++slice) {
      const auto reaches = [&](const Shard& shard) {
        return RangeInShard(boxes[slice], shape, shard).count > 0;
      };
      const std::vector<Shard>& shards = registry.ShardsHere(p);
      if (std::any_of(shards.begin(), shards.end(), reaches)) {
        parameter.slices_here[rank].push_back(slice);
      }
    }
  }
}

}  // namespace

StepLayout StepLayoutOf(const Registry& registry, const std::vector<std::string>& daemons,
                        int self) {
  StepLayout layout;
  layout.daemons = daemons;
  layout.self = self;
  layout.world_size = registry.spec().world_size;
  const auto& parameters = registry.spec().parameters;
  layout.parameters.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    StepLayout::Parameter& parameter = layout.parameters[i];
    parameter.name = parameters[i].name;
    parameter.replicated = parameters[i].replicated;
    parameter.state = registry.routing().parameters[i].state;
    for (std::int64_t rank = 0; rank < layout.world_size; ++rank) {
      const auto count = registry.SlicesOf(static_cast<int>(i), rank).size();
      if (count == 0) continue;
      parameter.slices_of_rank.resize(layout.world_size);
      parameter.slices_of_rank[rank] = static_cast<std::int64_t>(count);
    }
    parameter.here = HereOf(registry, static_cast<int>(i));
    if (parameter.here == StepLayout::Here::kSome) {
      ListSlicesHere(registry, static_cast<int>(i), parameter);
    }
  }
  return layout;
}

}  // namespace muond
