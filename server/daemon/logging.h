// The daemon's log: lines on stderr, for people or as JSON.
#pragma once

#include <string>

namespace muond {

// level: debug, info, warning, error. format: text ("2026-01-31 12:00:00.123 info  message") or
// json (one object per line with ts, level, msg). Both were checked by the configuration.
void SetUpLogging(const std::string& level, const std::string& format);

}  // namespace muond
