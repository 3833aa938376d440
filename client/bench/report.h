// A benchmark's result for people and for scripts. Pure.
#pragma once

#include <string>
#include <vector>

#include "client/bench/benchmark_run.h"
#include "nlohmann/json.hpp"

namespace muond::bench {

// A line about what ran, a table of the phases (median, spread, transfer rate and its shares), the
// ceilings, memory, and what was checked.
std::string ReportTable(const BenchmarkOptions& options, const BenchmarkResult& result);

// The same and every single time. Names carry their unit; docs/performance.md has the fields.
// Figures that were not measured are null.
nlohmann::ordered_json ReportJson(const BenchmarkOptions& options, const BenchmarkResult& result);
// Of several transports: the first one's report, with all of them side by side in `transports`.
nlohmann::ordered_json ReportJson(const BenchmarkOptions& options,
                                  const std::vector<BenchmarkResult>& results);

// What a program that paces the benchmark is told: once before the first step what is trained (each
// tensor's name, shape, and whether Muon trains it), and after each step its times.
nlohmann::ordered_json ReadyJson(const BenchmarkOptions& options);
nlohmann::ordered_json StepJson(const StepTimes& times);

}  // namespace muond::bench
