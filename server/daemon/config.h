// What the operator decides about a daemon, and where each decision came from.
//
// Order, always: command-line flag, then MUOND_* environment variable, then config file, then
// default. One name serves all three: --step-deadline, MUOND_STEP_DEADLINE, `step-deadline = ...`.
// CLI11 only parses the flags; its own order (file before environment) and its leniency with
// unknown keys are not what we promise.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/daemon/embedded.h"

namespace muond {

struct Config {
  // `listen` and `metrics_address` hold the daemon's defaults here, not the library's empty ones.
  ServiceOptions service;
  bool insecure = false;                          // plain TCP beyond loopback is meant so
  std::string log_level = "info";                 // debug, info, warning, error
  std::string log_format = "text";                // text, json
  absl::Duration drain_grace = absl::Seconds(30); // at SIGTERM, for running calls
  std::string file;                               // the config file that was read; empty: none
  // By setting name: "flag --listen", "environment MUOND_LISTEN", "muond.conf:12", "default".
  std::map<std::string, std::string> sources;
  // For the log, once there is one: unknown MUOND_* variables, settings that open a door.
  std::vector<std::string> warnings;

  Config();
};

// The MUOND_* part of a process's environment, by name. An empty value counts as unset.
using Environment = std::map<std::string, std::string>;
Environment ProcessEnvironment();

struct CommandLine {
  // Set: print it to stdout and exit with 0 (--help, --version, --print-config).
  std::string text;
  Config config;
};

// `arguments` without the program's name. INVALID_ARGUMENT, with the place that the value came
// from, for unknown flags and keys, bad values and combinations that make no sense; NOT_FOUND for a
// config file that is not there. main prints the message and exits with 2.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const Environment& environment);

// The settings in force in the config file's own format, each with its source as a comment. Reading
// it back gives the same settings.
std::string PrintConfig(const Config& config);

// The same for machines.
std::vector<ServiceSetting> SettingsOf(const Config& config);

// Checks what no single value can tell: addresses (form, loopback, twice), ranges, enumerations.
// May add warnings. Part of ParseCommandLine.
absl::Status CheckConfig(Config& config);

// Makes the directory of each unix socket, mode 0700, where it is missing. FAILED_PRECONDITION that
// names the flag and a way out when this user can't make it or can't write there.
absl::Status PrepareSocketDirectories(const Config& config);

// "muond 0.1.0".
std::string VersionText();

}  // namespace muond
