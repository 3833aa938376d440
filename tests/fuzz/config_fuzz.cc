// The daemon's configuration file.
#include <string>

#include "proto/check.h"
#include "server/daemon/config_file.h"
#include "tests/fuzz/input.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  muond::fuzz::Input input(data, size);
  const std::string_view text = input.Rest();
  const auto entries = muond::ParseConfigText(text, "f");
  if (!entries.ok()) {
    MUOND_CHECK(entries.status().message().substr(0, 2) == "f:", "the place is named");
    return 0;
  }
  // What was read, written anew: the same entries.
  std::string again;
  for (const muond::ConfigEntry& entry : *entries) {
    std::string value;
    for (const std::string& one : entry.values) {
      value += (value.empty() ? "" : ", ") + muond::QuoteConfigValue(one, false);
    }
    again += entry.key + " = " + (entry.array ? "[" + value + "]" : value) + "\n";
  }
  const auto twice = muond::ParseConfigText(again, "f");
  MUOND_CHECK(twice.ok() && twice->size() == entries->size(), "what was read can be written");
  for (std::size_t i = 0; i < entries->size(); ++i) {
    MUOND_CHECK((*twice)[i].key == (*entries)[i].key && (*twice)[i].values == (*entries)[i].values,
                "and read the same");
  }
  return 0;
}
