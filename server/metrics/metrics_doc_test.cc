#include <fstream>
#include <iterator>
#include <string>

#include "gtest/gtest.h"
#include "server/metrics/metrics_markdown.h"

namespace muond {
namespace {

TEST(MetricsDoc, IsUpToDate) {
  std::ifstream file("docs/metrics.md");
  ASSERT_TRUE(file) << "run from the repository's root";
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(page, MetricsMarkdown())
      << "write it anew: build/dev/bin/muond_metrics_doc > docs/metrics.md";
}

}  // namespace
}  // namespace muond
