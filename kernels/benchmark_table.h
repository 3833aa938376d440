// Rows that are measured round by round, each beside a ceiling of the same round.
//
// A machine that others use as well changes its speed all the time; a rate divided by the ceiling
// that was measured seconds before hardly moves. One thread.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace muond::kernels {

enum class Clock {
  kWall,
  kProcessor,  // of all threads of this process together, divided by their number
};

class BenchmarkTable {
 public:
  BenchmarkTable(Clock clock, int threads) : clock_(clock), threads_(threads) {}

  // A row: `work` units of 1e-9 `unit` per run, as in bytes and GB/s. `ceiling` is the name of an
  // earlier row of the same unit; empty: the row has none.
  void Add(std::string name, std::string unit, double work, std::string ceiling,
           std::function<void()> run);

  // Measures every row without a ceiling and those whose name contains `only`, once per round,
  // after a round that does not count. `rounds` >= 1.
  void Run(int rounds, const std::string& only);

  // After Run: medians over the rounds, for people and as {"title": ..., "rows": [...]} to `path`,
  // "-" for standard output. False, with errno set, where that cannot be written.
  void Print(const std::string& title) const;
  bool WriteJson(const std::string& title, const std::string& path) const;

 private:
  struct Row {
    std::string name, unit;
    double work;
    std::string ceiling;
    std::function<void()> run;
    std::vector<double> seconds;  // per round
  };

  double Now() const;
  static double Rate(const Row& row);
  double Share(const Row& row) const;

  Clock clock_;
  int threads_;
  std::deque<Row> rows_;
};

}  // namespace muond::kernels
