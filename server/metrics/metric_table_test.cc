#include "server/metrics/metric_table.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>
#include <set>
#include <string>
#include <string_view>

#include "gtest/gtest.h"

namespace muond {
namespace {

// Runs `check` for every row; a failure names the metric.
template <typename Check>
void ForEveryMetric(Check check) {
  for (const MetricRow& row : MetricTable()) {
    SCOPED_TRACE(std::string(row.name));
    check(row);
  }
}

TEST(MetricTable, NamesAreLowerCaseAndPrefixed) {
  ForEveryMetric([](const MetricRow& row) {
    EXPECT_TRUE(std::regex_match(std::string(row.name),
                                 std::regex("(muond|process|grpc_server)(_[a-z]+)+")));
  });
}

TEST(MetricTable, TotalIsTheEndOfExactlyTheCounters) {
  ForEveryMetric([](const MetricRow& row) {
    EXPECT_EQ(row.name.ends_with("_total"), row.type == MetricType::kCounter);
  });
}

TEST(MetricTable, TheBaseUnitStandsLast) {
  ForEveryMetric([](const MetricRow& row) {
    std::string_view name = row.name;
    if (name.ends_with("_total")) name.remove_suffix(6);
    EXPECT_TRUE(row.unit.empty() || row.unit == "seconds" || row.unit == "bytes") << row.unit;
    for (const std::string_view unit : {"seconds", "bytes"}) {
      EXPECT_EQ(name.ends_with("_" + std::string(unit)), row.unit == unit) << unit;
    }
    for (const char* wrong : {"_ms", "_us", "_mib", "_kb", "milliseconds", "percent", "_perc"}) {
      EXPECT_EQ(name.find(wrong), std::string_view::npos) << wrong;
    }
  });
}

TEST(MetricTable, HelpIsASentence) {
  ForEveryMetric([](const MetricRow& row) {
    ASSERT_FALSE(row.help.empty());
    EXPECT_TRUE(row.help.ends_with("."));
    EXPECT_TRUE(std::isupper(row.help[0]) || std::isdigit(row.help[0]));
    EXPECT_EQ(row.help.find('|'), std::string_view::npos) << "breaks the table of docs/metrics.md";
  });
}

TEST(MetricTable, NoLabelGrowsWithParametersStepsOrRequests) {
  const std::set<std::string_view> open = {"run",       "group",        "version",    "revision",
                                           "cuda",      "compiler",     "device",     "model",
                                           "grpc_type", "grpc_service", "grpc_method"};
  ForEveryMetric([&open](const MetricRow& row) {
    for (const MetricLabel& label : row.labels) {
      EXPECT_EQ(label.values.empty(), open.contains(label.name)) << label.name;
      EXPECT_LE(label.values.size(), 17u) << label.name;
      EXPECT_EQ(std::set(label.values.begin(), label.values.end()).size(), label.values.size());
    }
  });
}

TEST(MetricTable, HistogramBoundsAscendAndAreNotIntegers) {
  ForEveryMetric([](const MetricRow& row) {
    EXPECT_EQ(row.buckets.empty(), row.type != MetricType::kHistogram);
    EXPECT_TRUE(std::is_sorted(row.buckets.begin(), row.buckets.end()));
    EXPECT_EQ(std::set(row.buckets.begin(), row.buckets.end()).size(), row.buckets.size());
    for (const double bound : row.buckets) EXPECT_NE(bound, std::floor(bound));
  });
}

TEST(MetricTable, HasNoNameTwice) {
  std::set<std::string_view> names;
  for (const MetricRow& row : MetricTable()) EXPECT_TRUE(names.insert(row.name).second) << row.name;
}

TEST(MetricTable, FindsRowsById) {
  EXPECT_EQ(RowOf(MetricId::kBuildInfo).name, "muond_build_info");
  EXPECT_EQ(RowOf(MetricId::kGrpcServerHandling).name, "grpc_server_handling_seconds");
  EXPECT_EQ(RowOf(MetricId::kNsOutcomes).name, "muond_newton_schulz_outcomes_total");
}

}  // namespace
}  // namespace muond
