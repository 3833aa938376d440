#include "client/bench/statistics.h"

#include <algorithm>
#include <cstddef>

#include "proto/check.h"

namespace muond::bench {

Summary Summarize(std::vector<double> sample) {
  MUOND_CHECK(!sample.empty(), "a sample of nothing has no median");
  std::sort(sample.begin(), sample.end());
  const std::size_t n = sample.size();
  return {.median = (sample[(n - 1) / 2] + sample[n / 2]) / 2,
          .min = sample.front(),
          .max = sample.back(),
          .p90 = sample[(9 * n + 9) / 10 - 1]};
}

}  // namespace muond::bench
