// A reader of the exposition text for tests: sample values by series, as a scraper would see them.
#pragma once

#include <map>
#include <sstream>
#include <string>

namespace muond {

// "name{label=\"value\",...}" -> value, comments left out. Labels in alphabetical order, as
// prometheus-cpp writes them.
inline std::map<std::string, double> ParseExposition(const std::string& text) {
  std::map<std::string, double> samples;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    const std::size_t space = line.rfind(' ');
    samples[line.substr(0, space)] = std::stod(line.substr(space + 1));
  }
  return samples;
}

// Series without those of histograms (buckets, sums, counts).
inline std::size_t CountPlainSeries(const std::map<std::string, double>& samples) {
  std::size_t count = 0;
  for (const auto& [series, value] : samples) {
    const std::string name = series.substr(0, series.find('{'));
    if (name.ends_with("_bucket") || name.ends_with("_sum") || name.ends_with("_count")) continue;
    ++count;
  }
  return count;
}

}  // namespace muond
