#include "server/metrics/series.h"

#include <string>
#include <string_view>
#include <type_traits>

#include "proto/check.h"
#include "proto/mutex.h"

namespace muond {
namespace {

bool IsProcessMetric(const MetricRow& row) { return row.name.starts_with("process_"); }

template <typename Builder>
auto* BuildFamily(Builder builder, const MetricRow& row, prometheus::Registry& registry) {
  return &builder.Name(std::string(row.name)).Help(std::string(row.help)).Register(registry);
}

prometheus::Labels LabelsOf(const MetricRow& row, const LabelValues& values) {
  MUOND_CHECK(values.size() == row.labels.size(), "one value for each label of the metric");
  prometheus::Labels labels;
  for (std::size_t i = 0; i < values.size(); ++i) {
    labels.emplace(std::string(row.labels[i].name), values[i]);
  }
  return labels;
}

}  // namespace

MetricFamilies::MetricFamilies() {
  for (const MetricRow& row : MetricTable()) {
    if (IsProcessMetric(row)) {
      families_.emplace_back();
      continue;
    }
    switch (row.type) {
      case MetricType::kCounter:
        families_.emplace_back(BuildFamily(prometheus::BuildCounter(), row, registry_));
        break;
      case MetricType::kGauge:
        families_.emplace_back(BuildFamily(prometheus::BuildGauge(), row, registry_));
        break;
      case MetricType::kHistogram:
        families_.emplace_back(BuildFamily(prometheus::BuildHistogram(), row, registry_));
        break;
    }
  }
}

template <typename T>
T* MetricFamilies::Acquire(MetricId id, const LabelValues& values) {
  const MetricRow& row = RowOf(id);
  auto** family = std::get_if<prometheus::Family<T>*>(&families_[static_cast<std::size_t>(id)]);
  MUOND_CHECK(family != nullptr, "the metric is of another type");
  const prometheus::Labels labels = LabelsOf(row, values);
  MutexLock lock(mutex_);
  T* child;
  if constexpr (std::is_same_v<T, prometheus::Histogram>) {
    child = &(*family)->Add(labels, row.buckets);
  } else {
    child = &(*family)->Add(labels);
  }
  ++holders_[child];
  return child;
}

template <typename T>
void MetricFamilies::Release(MetricId id, T* child) {
  MutexLock lock(mutex_);
  const auto holder = holders_.find(child);
  MUOND_CHECK(holder != holders_.end(), "released a series that nobody holds");
  if (--holder->second > 0) return;
  holders_.erase(holder);
  std::get<prometheus::Family<T>*>(families_[static_cast<std::size_t>(id)])->Remove(child);
}

SeriesSet::~SeriesSet() {
  for (auto& release : releases_) release();
}

template <typename T>
T* SeriesSet::Add(MetricId id, const LabelValues& values) {
  T* child = families_->Acquire<T>(id, values);
  releases_.emplace_back([families = families_, id, child] { families->Release(id, child); });
  return child;
}

template <typename T>
std::vector<T*> SeriesSet::AddAll(MetricId id, const LabelValues& leading) {
  const MetricLabel& label = RowOf(id).labels.back();
  MUOND_CHECK(!label.values.empty(), "the metric's last label has no closed set of values");
  std::vector<T*> children;
  for (const std::string_view value : label.values) {
    LabelValues values = leading;
    values.emplace_back(value);
    children.push_back(Add<T>(id, values));
  }
  return children;
}

prometheus::Counter* SeriesSet::AddCounter(MetricId id, const LabelValues& values) {
  return Add<prometheus::Counter>(id, values);
}
prometheus::Gauge* SeriesSet::AddGauge(MetricId id, const LabelValues& values) {
  return Add<prometheus::Gauge>(id, values);
}
prometheus::Histogram* SeriesSet::AddHistogram(MetricId id, const LabelValues& values) {
  return Add<prometheus::Histogram>(id, values);
}
std::vector<prometheus::Counter*> SeriesSet::AddCounters(MetricId id, const LabelValues& leading) {
  return AddAll<prometheus::Counter>(id, leading);
}
std::vector<prometheus::Gauge*> SeriesSet::AddGauges(MetricId id, const LabelValues& leading) {
  return AddAll<prometheus::Gauge>(id, leading);
}
std::vector<prometheus::Histogram*> SeriesSet::AddHistograms(MetricId id,
                                                             const LabelValues& leading) {
  return AddAll<prometheus::Histogram>(id, leading);
}

}  // namespace muond
