// A benchmark's result for people and for scripts. Pure.
#pragma once

#include <string>

#include "client/bench/benchmark_run.h"
#include "nlohmann/json.hpp"

namespace muond::bench {

// A line about what ran, a table of the phases (median, minimum, maximum, transfer rate and its
// share of memcpy), a line about what was checked.
std::string ReportTable(const BenchmarkOptions& options, const BenchmarkResult& result);

// The same and every single time, in seconds and bytes per second.
nlohmann::ordered_json ReportJson(const BenchmarkOptions& options, const BenchmarkResult& result);

}  // namespace muond::bench
