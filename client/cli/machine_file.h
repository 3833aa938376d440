// Machines that `muonctl plan --machine` knows: one by name, or the rates in a file of one's own.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/registry/step_time.h"

namespace muond::cli {

// The rates in the file of that name where there is one, else of the machine of that name. A file
// is a JSON object with every rate of MachineRates (server/registry/step_time.h) as a number, and
// perhaps "name". INVALID_ARGUMENT that names the file and the key; what comes back is valid.
absl::StatusOr<MachineRates> LoadMachine(const std::string& name_or_file);

}  // namespace muond::cli
