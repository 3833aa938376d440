// What is alike on all daemons at a version, beside the state itself: as the step machine knows it,
// in the form that checkpoints keep.
#pragma once

#include <cstdint>

#include "server/checkpoint/manifest.h"
#include "server/step/step_machine.h"

namespace muond {

// `step`: the version, steps consumed. `generation`: 0 where what it was is of no interest.
inline checkpoint::Control ControlOf(const StepMemory& memory, std::int64_t generation,
                                     std::int64_t step) {
  return {.generation = generation,
          .step = step,
          .scaler = {.scale = memory.scaler.scale,
                     .good_steps = memory.scaler.good_steps,
                     .hysteresis_left = memory.scaler.hysteresis_left,
                     .overflows_at_minimum = memory.scaler.overflows_at_minimum},
          .counters = {.applied_steps = memory.applied_steps,
                       .skipped_steps = memory.skipped_steps,
                       .consecutive_skips = memory.consecutive_skips},
          .last_outcome = memory.last_outcome,
          .muon = memory.muon,
          .adamw = memory.adamw};
}

}  // namespace muond
