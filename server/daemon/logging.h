// The daemon's log: one line a message on stderr, as text or as JSON objects with run and step.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace muond {

// `level` and `format` as in Config, checked there. Once, before any message. Messages of one kind
// are limited in rate (log_filter.h).
void SetUpLogging(const std::string& level, const std::string& format);

// Called for each line with the name of its level, until it is replaced; null: nobody.
void SetLogListener(std::function<void(std::string_view level)> listener);

}  // namespace muond
