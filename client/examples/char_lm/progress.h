// How far a run is: a bar that redraws itself on a terminal, else a line for every twentieth part.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace muond::char_lm {

class Progress {
 public:
  // `stream` decides which of the two it is.
  Progress(std::string label, std::int64_t total, std::FILE* stream);
  ~Progress();
  void Update(std::int64_t done, const std::string& note);

 private:
  const std::string label_;
  const std::int64_t total_;
  std::FILE* const stream_;
  const bool terminal_;
  std::int64_t shown_ = 0;  // twentieths (plain) or hundredths (terminal) already shown
};

}  // namespace muond::char_lm
