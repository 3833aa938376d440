// What stands between a log message and the log: messages of one kind are limited in rate, and the
// run and the step that a message is about are found for those who read by machine. Pure; the clock
// is an argument.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/time/time.h"

namespace muond {

// Messages name their objects the same way everywhere: run "r": ... step 41 ...
struct LogFields {
  std::string run;                   // empty: none
  std::optional<std::int64_t> step;
};
LogFields LogFieldsOf(std::string_view message);

// Lets kBurst messages of a kind pass in each period, and says with the next one how many were left
// out. Two messages are of a kind when they differ in nothing but digits. Not thread-safe.
class LogFilter {
 public:
  static constexpr int kBurst = 20;
  static constexpr absl::Duration kPeriod = absl::Seconds(10);

  // What to write: the message, perhaps with a count of those left out; empty: nothing.
  std::optional<std::string> Admit(std::string_view message, absl::Time now);

 private:
  struct Kind {
    absl::Time since = absl::InfinitePast();  // the period's begin
    int written = 0;
    std::int64_t left_out = 0;
  };
  std::map<std::string, Kind, std::less<>> kinds_;
};

}  // namespace muond
