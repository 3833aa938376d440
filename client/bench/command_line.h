// What the command line of muond-bench asks for.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/benchmark_run.h"

namespace muond::bench {

struct CommandLine {
  BenchmarkOptions options;
  std::vector<std::string> transports;  // measured one after another, the first in `options`
  bool in_process = false;         // a service of this process instead of options.endpoint
  std::string backend = "cpu";     // of that service
  std::string json;                // file, "-" for stdout; empty: none
  bool paced = false;              // a line on stdin lets each measured step go
  bool memory_must_fit = false;    // more memory than needed is a failure
  std::string bare_stream_socket;  // not empty: be the other end of a bare stream
  std::string text;                // not empty: help or version, print it and exit with 0
};

// INVALID_ARGUMENT that names the flag and the value. `endpoint` is that of the environment, or "".
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv,
                                             const std::string& endpoint);

}  // namespace muond::bench
