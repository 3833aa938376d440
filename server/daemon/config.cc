#include "server/daemon/config.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/check.h"
#include "server/daemon/config_file.h"
#include "server/daemon/config_settings.h"

namespace muond {
namespace {

// Variables of the client's programs, which share the prefix.
constexpr std::string_view kClientVariables[] = {"MUOND_ENDPOINT", "MUOND_ENDPOINTS",
                                                 "MUOND_TIMEOUT",  "MUOND_OUTPUT",
                                                 "MUOND_RUN",      "MUOND_CONFIG"};

constexpr char kDescription[] =
    "muond - the distributed optimizer service: owns Muon and AdamW state, takes gradient slices\n"
    "from trainers, applies each step once and for all.\n\n"
    "Each option can also be set by its environment variable or under its name in the config\n"
    "file; a flag wins over the variable, the variable over the file.";

// What the command line said, before anything is applied.
struct Flags {
  std::map<std::string, std::vector<std::string>> values;  // by setting name
  std::optional<std::string> file;
  bool print_config = false;
  std::string text;  // of --help or --version
};

std::string OptionHelp(const Setting& setting) {
  const std::string preset = absl::StrJoin(setting.get(Config()), ",");
  return absl::StrFormat("%s [%s%s]", setting.help, setting.Variable(),
                         preset.empty() || setting.kind == SettingKind::kSwitch
                             ? ""
                             : ", default " + preset);
}

absl::StatusOr<Flags> ParseFlags(const std::vector<std::string>& arguments) {
  CLI::App app(kDescription, "muond");
  app.set_version_flag("--version", VersionText(), "print the version and exit");
  Flags flags;
  std::string file;
  CLI::Option* file_option =
      app.add_option("--config", file, "config file [MUOND_CONFIG]")->type_name("FILE");
  app.add_flag("--print-config", flags.print_config,
               "print the settings in force, each with its source, and exit");
  std::map<std::string, std::string> switches;
  std::map<std::string, CLI::Option*> options;
  for (const Setting& setting : AllSettings()) {
    const std::string name(setting.name);
    CLI::Option* option = nullptr;
    if (setting.kind == SettingKind::kSwitch) {
      option = app.add_flag(setting.Flag(), switches[name], OptionHelp(setting));
    } else {
      option = app.add_option(setting.Flag(), flags.values[name], OptionHelp(setting))
                   ->type_name(std::string(setting.placeholder));
      if (setting.kind == SettingKind::kList) {
        option->delimiter(',')->allow_extra_args(false);
      } else {
        option->expected(1);
      }
    }
    options[name] = option;
  }
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    flags.text = app.help();
    return flags;
  } catch (const CLI::CallForVersion&) {
    flags.text = VersionText() + "\n";
    return flags;
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(
        absl::StrFormat("command line: %s (see muond --help)", error.what()));
  }
  for (const auto& [name, option] : options) {
    if (option->count() == 0) {
      flags.values.erase(name);
    } else if (FindSetting(name)->kind == SettingKind::kSwitch) {
      flags.values[name] = {switches[name]};
    }
  }
  if (file_option->count() > 0) flags.file = file;
  return flags;
}

absl::Status Apply(const Setting& setting, const std::vector<std::string>& values,
                   const std::string& source, Config& config) {
  const absl::Status status = setting.set(config, values);
  if (!status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s (%s): %s", setting.name, source, status.message()));
  }
  config.sources[std::string(setting.name)] = source;
  return absl::OkStatus();
}

absl::Status ApplyFile(const std::string& path, Config& config) {
  std::ifstream file(path);
  if (!file)
    return absl::NotFoundError(absl::StrFormat("config file \"%s\": cannot read it", path));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  MUOND_ASSIGN_OR_RETURN(const std::vector<ConfigEntry> entries, ParseConfigText(text, path));
  for (const ConfigEntry& entry : entries) {
    const std::string place = absl::StrFormat("%s:%d", path, entry.line);
    const Setting* setting = FindSetting(entry.key);
    if (setting == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: unknown key \"%s\"%s", place, entry.key, DidYouMean(entry.key)));
    }
    if (entry.array && setting->kind != SettingKind::kList) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: key \"%s\" takes one value, not an array", place, entry.key));
    }
    MUOND_RETURN_IF_ERROR(Apply(*setting, entry.values, place, config));
  }
  config.file = path;
  return absl::OkStatus();
}

absl::Status ApplyEnvironment(const Environment& environment, Config& config) {
  std::map<std::string, const Setting*> by_variable;
  for (const Setting& setting : AllSettings()) by_variable[setting.Variable()] = &setting;
  for (const auto& [variable, value] : environment) {
    if (value.empty()) continue;
    const auto found = by_variable.find(variable);
    if (found == by_variable.end()) {
      const bool client = std::find(std::begin(kClientVariables), std::end(kClientVariables),
                                    variable) != std::end(kClientVariables);
      if (!client) {
        config.warnings.push_back(
            absl::StrFormat("environment variable %s is none of ours; ignored", variable));
      }
      continue;
    }
    const Setting& setting = *found->second;
    std::vector<std::string> values = {value};
    if (setting.kind == SettingKind::kList) values = absl::StrSplit(value, ',');
    MUOND_RETURN_IF_ERROR(Apply(setting, values, "environment " + variable, config));
  }
  return absl::OkStatus();
}

// Whether the file's format writes values of this kind bare.
bool IsBare(const Setting& setting, const std::string& value) {
  if (setting.kind == SettingKind::kSwitch) return true;
  const bool number = setting.kind == SettingKind::kInteger || setting.kind == SettingKind::kBytes;
  return number && value.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

Config::Config() {
  service.listen = {"unix:///run/muond/muond.sock", "127.0.0.1:7070"};
  service.metrics_address = "127.0.0.1:9470";
  service.backend = "auto";
}

Environment ProcessEnvironment() {
  Environment result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (!text.starts_with("MUOND_") || equals == std::string_view::npos) continue;
    result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const Environment& environment) {
  CommandLine result;
  MUOND_ASSIGN_OR_RETURN(const Flags flags, ParseFlags(arguments));
  result.text = flags.text;
  if (!result.text.empty()) return result;

  // From the weakest source to the strongest: each overwrites what came before.
  Config& config = result.config;
  const auto variable = environment.find("MUOND_CONFIG");
  const std::string from_environment = variable == environment.end() ? "" : variable->second;
  const std::string file = flags.file.value_or(from_environment);
  if (!file.empty()) MUOND_RETURN_IF_ERROR(ApplyFile(file, config));
  MUOND_RETURN_IF_ERROR(ApplyEnvironment(environment, config));
  for (const auto& [name, values] : flags.values) {
    const Setting& setting = *FindSetting(name);
    MUOND_RETURN_IF_ERROR(Apply(setting, values, "flag " + setting.Flag(), config));
  }
  MUOND_RETURN_IF_ERROR(CheckConfig(config));
  if (flags.print_config) result.text = PrintConfig(config);
  return result;
}

std::string PrintConfig(const Config& config) {
  std::string text = absl::StrFormat("# %s, settings in force\n", VersionText());
  for (const Setting& setting : AllSettings()) {
    std::vector<std::string> values = setting.get(config);
    const bool address =
        setting.name == "metrics-address" || setting.name == "health-address";
    if (address && values[0].empty()) values[0] = "none";
    for (std::string& value : values) value = QuoteConfigValue(value, IsBare(setting, value));
    const std::string joined = absl::StrJoin(values, ", ");
    const auto source = config.sources.find(std::string(setting.name));
    text += absl::StrFormat("%s = %s  # %s\n", setting.name,
                            setting.kind == SettingKind::kList ? "[" + joined + "]" : joined,
                            source == config.sources.end() ? "default" : source->second);
  }
  return text;
}

std::vector<ServiceSetting> SettingsOf(const Config& config) {
  std::vector<ServiceSetting> settings;
  for (const Setting& setting : AllSettings()) {
    const std::string name(setting.name);
    const auto source = config.sources.find(name);
    settings.push_back(
        {name, setting.get(config), source == config.sources.end() ? "default" : source->second});
  }
  return settings;
}

std::string VersionText() { return "muond " MUOND_VERSION; }

}  // namespace muond
