// The config file's format: a strict, flat subset of TOML. Internal to server/daemon.
//
//   # a comment
//   threads = 8                                   whole numbers, true and false are bare
//   step-deadline = "2m"                          everything else is a quoted string
//   listen = ["127.0.0.1:7070", "[::1]:7070"]     arrays of strings may go on over several lines
//
// No tables, no dotted keys, no multi-line strings, no dates; a string knows \" and \\ only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace muond {

struct ConfigEntry {
  std::string key = {};
  std::vector<std::string> values = {};  // one, unless an array
  bool array = false;
  int line = 0;                     // where the key stands, from 1
};

// INVALID_ARGUMENT "name:line: ..." for what is not of the format, and for a key that comes twice.
absl::StatusOr<std::vector<ConfigEntry>> ParseConfigText(std::string_view text,
                                                         const std::string& name);

// The same value as text: true, 8 or "2m".
std::string QuoteConfigValue(const std::string& value, bool bare);

}  // namespace muond
