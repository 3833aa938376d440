// The standard process_* metrics, read from /proc at every scrape.
#pragma once

#include <vector>

#include "prometheus/metric_family.h"

namespace muond {

// One family per process_* row of the metric table. A value that cannot be read is left out.
std::vector<prometheus::MetricFamily> CollectProcessMetrics();

}  // namespace muond
