// The daemon's settings in one table: a new setting is one row here and a field in Config.
// Internal to server/daemon.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/daemon/config.h"

namespace muond {

enum class SettingKind : std::uint8_t {
  kText,      // one string
  kList,      // strings; separated by commas in flags and variables, an array in the file
  kSwitch,    // true or false; the bare flag means true
  kInteger,   // a whole number
  kBytes,     // a whole number, or one with KiB, MiB, GiB or TiB
  kDuration,  // "90s", "2m", "500ms"
};

struct Setting {
  std::string_view name;         // "step-deadline"
  SettingKind kind;
  std::string_view placeholder;  // in --help: "DURATION"
  std::string_view help;
  // Parses and stores; the error says what was expected and what came, not which setting.
  std::function<absl::Status(Config&, const std::vector<std::string>&)> set;
  // The values as `set` takes them.
  std::function<std::vector<std::string>(const Config&)> get;

  std::string Flag() const;      // "--step-deadline"
  std::string Variable() const;  // "MUOND_STEP_DEADLINE"
};

std::span<const Setting> AllSettings();

// The setting of that name, or null.
const Setting* FindSetting(std::string_view name);

// " (did you mean \"listen\"?)" when a known name is close to `name`, else "".
std::string DidYouMean(std::string_view name);

}  // namespace muond
