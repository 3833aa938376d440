// The reference page docs/metrics.md, made from the metric table.
#pragma once

#include <string>

namespace muond {

// The whole page, with a trailing newline.
std::string MetricsMarkdown();

}  // namespace muond
