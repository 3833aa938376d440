#include "server/run/registry_layout.h"

namespace muond {

StepLayout StepLayoutOf(const Registry& registry) {
  StepLayout layout;
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
  }
  return layout;
}

}  // namespace muond
