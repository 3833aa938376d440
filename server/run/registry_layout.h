// What the step machine must know of a registry in which all ranks have joined.
#pragma once

#include "server/registry/registry.h"
#include "server/step/step_machine.h"

namespace muond {

StepLayout StepLayoutOf(const Registry& registry);

}  // namespace muond
