// The live series of the registry: families made from the metric table, children counted by their
// users. Internal to server/metrics; the rest of the server speaks to RunMetrics and DaemonMetrics.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "proto/mutex.h"
#include "server/metrics/metric_table.h"

namespace muond {

using LabelValues = std::vector<std::string>;  // in the order of MetricRow::labels

// One prometheus-cpp family per table row (process_* aside, which are read at scrape time).
// Thread-safe. A child lives while someone holds it: prometheus-cpp gives the same child to two
// callers with the same labels, so that a run that is reopened while the old one is still being
// torn down would otherwise lose its series, or write to freed memory.
class MetricFamilies {
 public:
  MetricFamilies();
  MetricFamilies(const MetricFamilies&) = delete;
  MetricFamilies& operator=(const MetricFamilies&) = delete;

  // T is the type of the row's metric; one value per label. The child starts at 0.
  template <typename T>
  T* Acquire(MetricId id, const LabelValues& values);
  template <typename T>
  void Release(MetricId id, T* child);

  const prometheus::Registry& registry() const { return registry_; }

 private:
  using AnyFamily = std::variant<std::monostate, prometheus::Family<prometheus::Counter>*,
                                 prometheus::Family<prometheus::Gauge>*,
                                 prometheus::Family<prometheus::Histogram>*>;

  prometheus::Registry registry_;
  std::vector<AnyFamily> families_;  // by MetricId
  Mutex mutex_;
  std::map<const void*, int> holders_ MUOND_GUARDED_BY(mutex_);  // of each child
};

// Series that go away together. Destroying the set removes those that nobody else holds. Not
// thread-safe while series are added; the children themselves are.
class SeriesSet {
 public:
  // `families` must outlive the set.
  explicit SeriesSet(MetricFamilies* families) : families_(families) {}
  ~SeriesSet();
  SeriesSet(const SeriesSet&) = delete;
  SeriesSet& operator=(const SeriesSet&) = delete;

  prometheus::Counter* AddCounter(MetricId id, const LabelValues& values = {});
  prometheus::Gauge* AddGauge(MetricId id, const LabelValues& values = {});
  prometheus::Histogram* AddHistogram(MetricId id, const LabelValues& values = {});

  // One child for each value of the row's last label, which must have a closed set, in its order.
  std::vector<prometheus::Counter*> AddCounters(MetricId id, const LabelValues& leading = {});
  std::vector<prometheus::Gauge*> AddGauges(MetricId id, const LabelValues& leading = {});
  std::vector<prometheus::Histogram*> AddHistograms(MetricId id, const LabelValues& leading = {});

 private:
  template <typename T>
  T* Add(MetricId id, const LabelValues& values);
  template <typename T>
  std::vector<T*> AddAll(MetricId id, const LabelValues& leading);

  MetricFamilies* families_;
  std::vector<std::function<void()>> releases_;
};

}  // namespace muond
