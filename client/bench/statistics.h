// Medians and spread of a sample.
#pragma once

#include <vector>

namespace muond::bench {

struct Summary {
  double median = 0;  // of an even number: the mean of the two in the middle
  double min = 0;
  double max = 0;
  double p90 = 0;  // the smallest value that at least 90 % of the sample do not exceed
};

// `sample` must not be empty.
Summary Summarize(std::vector<double> sample);

}  // namespace muond::bench
