#include "client/cli/machine_file.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/message_json.h"

namespace muond::cli {
namespace {

absl::StatusOr<MachineRates> ReadMachine(const std::string& file) {
  const auto refuse = [&](const std::string& cause) {
    return absl::InvalidArgumentError(absl::StrFormat("machine file \"%s\": %s", file, cause));
  };
  std::ifstream stream(file);
  const Json json = Json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return refuse("expected a JSON object");
  MachineRates rates{.name = file};
  const std::map<std::string, double*> keys = {
      {"newton_schulz_tflops", &rates.newton_schulz_tflops},
      {"memory_gbps", &rates.memory_gbps},
      {"link_gbps", &rates.link_gbps},
      {"step_ms", &rates.step_ms},
      {"peer_ms", &rates.peer_ms}};
  for (const auto& entry : json.items()) {
    const auto key = keys.find(entry.key());
    if (entry.key() == "name" && entry.value().is_string()) {
      rates.name = entry.value().get<std::string>();
    } else if (key != keys.end() && entry.value().is_number()) {
      *key->second = entry.value().get<double>();
    } else {
      const auto append = [](std::string* out, const auto& one) { *out += one.first; };
      return refuse(absl::StrFormat("key \"%s\": expected numbers named %s, and a string \"name\"",
                                    entry.key(), absl::StrJoin(keys, ", ", append)));
    }
  }
  for (const auto& [key, value] : keys) {
    if (!json.contains(key)) return refuse(absl::StrFormat("key \"%s\" is missing", key));
  }
  if (const absl::Status valid = ValidateRates(rates); !valid.ok()) {
    return refuse(std::string(valid.message()));
  }
  return rates;
}

}  // namespace

absl::StatusOr<MachineRates> LoadMachine(const std::string& name_or_file) {
  std::error_code ignored;
  if (std::filesystem::exists(name_or_file, ignored)) return ReadMachine(name_or_file);
  absl::StatusOr<MachineRates> machine = FindMachine(name_or_file);
  if (machine.ok()) return machine;
  return absl::InvalidArgumentError(
      absl::StrFormat("%s, or a machine file that exists", machine.status().message()));
}

}  // namespace muond::cli
