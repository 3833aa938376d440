// Clocks, medians and two ways to print them.
#include "kernels/benchmark_table.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace muond::kernels {
namespace {

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

void BenchmarkTable::Add(std::string name, std::string unit, double work, std::string ceiling,
                         std::function<void()> run) {
  rows_.push_back({std::move(name), std::move(unit), work, std::move(ceiling), std::move(run), {}});
}

void BenchmarkTable::Run(int rounds, const std::string& only) {
  std::erase_if(rows_, [&](const Row& row) {
    return !row.ceiling.empty() && row.name.find(only) == std::string::npos;
  });
  for (int round = -1; round < rounds; ++round) {
    for (Row& row : rows_) {
      const double begin = Now();
      row.run();
      const double seconds = Now() - begin;
      if (round >= 0) row.seconds.push_back(seconds);
    }
  }
}

void BenchmarkTable::Print(const std::string& title) const {
  std::printf("%s\n\n%-38s %10s %10s %-10s %s\n", title.c_str(), "", "ms", "rate", "",
              "share of its ceiling");
  for (const Row& row : rows_) {
    std::printf("%-38s %10.3f %10.1f %-10s", row.name.c_str(), 1e3 * Median(row.seconds), Rate(row),
                row.unit.c_str());
    if (!row.ceiling.empty()) {
      std::printf(" %3.0f %% of %s", 100 * Share(row), row.ceiling.c_str());
    }
    std::printf("\n");
  }
}

bool BenchmarkTable::WriteJson(const std::string& title, const std::string& path) const {
  std::FILE* file = path == "-" ? stdout : std::fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  std::fprintf(file, "{\"title\": \"%s\", \"rows\": [", title.c_str());
  const char* separator = "\n";
  for (const Row& row : rows_) {
    std::fprintf(file, "%s  {\"name\": \"%s\", \"milliseconds\": %.6g, \"rate\": %.6g, ", separator,
                 row.name.c_str(), 1e3 * Median(row.seconds), Rate(row));
    std::fprintf(file, "\"unit\": \"%s\"", row.unit.c_str());
    if (!row.ceiling.empty()) {
      std::fprintf(file, ", \"ceiling\": \"%s\", \"share\": %.4g", row.ceiling.c_str(), Share(row));
    }
    std::fprintf(file, "}");
    separator = ",\n";
  }
  std::fprintf(file, "\n]}\n");
  return file == stdout ? std::fflush(file) == 0 : std::fclose(file) == 0;
}

double BenchmarkTable::Now() const {
  const bool processor = clock_ == Clock::kProcessor;
  timespec now{};
  clock_gettime(processor ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return (static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec)) /
         (processor ? threads_ : 1);
}

double BenchmarkTable::Rate(const Row& row) { return row.work / Median(row.seconds) / 1e9; }

double BenchmarkTable::Share(const Row& row) const {
  const auto ceiling = std::find_if(rows_.begin(), rows_.end(),
                                    [&](const Row& other) { return other.name == row.ceiling; });
  std::vector<double> shares;
  for (std::size_t i = 0; i < row.seconds.size(); ++i) {
    shares.push_back(row.work / row.seconds[i] / (ceiling->work / ceiling->seconds[i]));
  }
  return Median(shares);
}

}  // namespace muond::kernels
