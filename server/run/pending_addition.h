// Parameters that trainers want added to a run, from the first rank that asks for them until they
// are the run's.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/engines.h"
#include "server/registry/registry.h"

namespace muond {

struct PendingAddition {
  std::unique_ptr<Registry> registry;  // of the run with them; ranks that asked have joined it
  std::string name;                    // AdditionName
  std::unique_ptr<Engines::Addition> engines;
  // Told to another daemon that raises the generation: it must be here when the order comes.
  bool promised = false;
};

// What a rank that asked is told.
struct AdditionAnswer {
  std::string name;      // of the run's parameters with these
  bool adopted = false;  // they are the run's already
};
using AdditionCallback = std::function<void(const absl::StatusOr<AdditionAnswer>&)>;

// Names a run's parameters and who owns them: equal on two daemons iff both are. 32 hex digits.
std::string AdditionName(const Registry& registry);

}  // namespace muond
