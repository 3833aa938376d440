// Plays seeds of the simulation and reports what was found.
//
//   simulation --seed 1234 --verbose    one seed, with its log
//   simulation --seeds 0:100000         a range, with a summary
//   simulation --seeds 0:2000 --bug apply-twice
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "tests/simulation/simulation.h"

namespace muond::simulation {
namespace {

constexpr int kShown = 10;

// Plays seeds [first, end). Returns how many violated an invariant.
std::int64_t Play(std::uint64_t first, std::uint64_t end, const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  std::int64_t events = 0;
  std::int64_t violations = 0;
  Coverage coverage;
  for (std::uint64_t seed = first; seed < end; ++seed) {
    const Result result = Simulate(seed, options);
    events += result.events;
    coverage.Add(result.coverage);
    if (result.violation.empty()) continue;
    if (++violations <= kShown) {
      std::printf("seed %llu at %.3f ms: %s\n", static_cast<unsigned long long>(seed),
                  static_cast<double>(result.ended) / 1000, result.violation.c_str());
      std::fflush(stdout);
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("seeds %llu:%llu: %lld violations, %lld events, %.1f s\n",
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(end),
              static_cast<long long>(violations), static_cast<long long>(events), took.count());
  std::printf("%s\n", coverage.ToString().c_str());
  return violations;
}

int Main(int argc, char** argv) {
  CLI::App app("Plays the step machine of several daemons under faults.", "simulation");
  std::string seeds = "0:2000";
  std::string bug = "none";
  std::int64_t seed = -1;
  Options options;
  app.add_option("--seed", seed, "play this seed");
  app.add_option("--seeds", seeds, "play the seeds FIRST:END")->capture_default_str();
  app.add_option("--bug", bug, "plant a bug into the daemons")->capture_default_str();
  app.add_flag("--restless", options.restless, "more crashes, more new generations");
  app.add_flag("--verbose", options.verbose, "print every event");
  CLI11_PARSE(app, argc, argv);
  const std::size_t colon = seeds.find(':');
  const auto planted = FindBug(bug);
  if (colon == std::string::npos || !planted) {
    std::fprintf(stderr, "simulation: expected --seeds FIRST:END, and --bug one of");
    for (const auto& [value, name] : kBugs) std::fprintf(stderr, " %s", std::string(name).c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  options.bug = *planted;
  const bool one = seed >= 0;
  const auto first = one ? static_cast<std::uint64_t>(seed) : std::stoull(seeds.substr(0, colon));
  return Play(first, one ? first + 1 : std::stoull(seeds.substr(colon + 1)), options) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace muond::simulation

int main(int argc, char** argv) { return muond::simulation::Main(argc, argv); }
