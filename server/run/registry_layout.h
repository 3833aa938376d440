// What the step machine must know of a registry in which all ranks have joined.
#pragma once

#include <string>
#include <vector>

#include "server/registry/registry.h"
#include "server/step/step_machine.h"

namespace muond {

// `daemons` and `self` as in StepLayout.
StepLayout StepLayoutOf(const Registry& registry, const std::vector<std::string>& daemons,
                        int self);

}  // namespace muond
