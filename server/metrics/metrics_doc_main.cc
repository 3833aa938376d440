// Prints docs/metrics.md: build/dev/bin/muond_metrics_doc > docs/metrics.md
#include <iostream>

#include "server/metrics/metrics_markdown.h"

int main() {
  std::cout << muond::MetricsMarkdown();
  return 0;
}
