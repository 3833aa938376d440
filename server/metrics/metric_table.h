// Every metric that the product exports, in one table: name, type, labels, unit, help, buckets.
// The registry, docs/metrics.md and the checks of dashboards and alerts are all made from it, so a
// new metric is one enumerator, one row and the call that fills it.
//
// Rules (Prometheus' naming and instrumentation guides, checked by metric_table_test): base units,
// the unit last in the name, `_total` exactly on counters, no generated part in a name, no label
// that a parameter, a step or a request could multiply. Histogram bounds are not integers, because
// Prometheus 3 rewrites an integer `le`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace muond {

enum class MetricId : std::uint8_t {
  // The daemon.
  kBuildInfo, kBackendInfo, kReady, kLogMessages,
  kProcessStartTime, kProcessCpu, kProcessResidentMemory, kProcessVirtualMemory, kProcessOpenFds,
  kProcessMaxFds,
  kMemory, kQueueDepth,
  // Runs.
  kRunActive, kRunState, kTrainersConnected, kTrainersExpected, kMuonExpected, kParameters,
  kParameterElements, kShardElements,
  kCheckpoints, kCheckpointDuration, kCheckpointSize, kCheckpointLastSuccess, kCheckpointLastStep,
  kCheckpointInterval, kBuddySent, kBuddyWait, kBuddyRecoveries,
  // Steps.
  kSteps, kLastStep, kLastStepTimestamp, kStepInflight, kStepInflightStartTimestamp,
  kStepWaitingShards, kStepDuration, kStepPhase, kConsecutiveSkips, kDuplicateRequests,
  kShardBusy,
  // Numerics.
  kLossScale, kLossScaleMin, kLossScaleChanges, kLearningRate, kGradNorm, kGradClippedSteps,
  kNonfiniteElements, kNonfiniteTensors, kMomentumNorm, kWeightNorm, kNsCalls, kNsOutcomes,
  kNsSpecial, kNsResidual, kMuonUpdates, kMomentumGradCosine, kUpdateRmsRatio, kMomentumStale,
  kWorstValue,
  // Transport and RPC.
  kTransportBytes, kTransportMessages, kTransportErrors, kPeerRtt, kTransportChoices,
  kTransportFallbacks, kTransportConnections,
  kGrpcServerStarted, kGrpcServerHandled, kGrpcServerHandling,
};

enum class MetricType : std::uint8_t { kCounter, kGauge, kHistogram };
std::string_view MetricTypeName(MetricType type);  // "counter", "gauge", "histogram"

enum class MetricSection : std::uint8_t { kDaemon, kRuns, kSteps, kNumerics, kTransport };
std::string_view MetricSectionName(MetricSection section);  // a heading: "Daemon", "Runs", ...

// Label values from a closed set are in the order of the C++ enumeration that selects among them.
// Series of a closed set all exist from the start, at 0, so that rate() and absent() tell the
// truth.
struct MetricLabel {
  std::string_view name;
  std::vector<std::string_view> values;  // empty: open (run and group names, build facts, methods)
};

struct MetricRow {
  MetricId id;
  std::string_view name;
  MetricType type;
  MetricSection section;
  std::vector<MetricLabel> labels;
  std::string_view unit;  // "seconds", "bytes"; empty: a count or a plain number
  std::string_view help;  // one sentence
  std::vector<double> buckets;  // of a histogram, ascending, without +Inf
};

// All rows, in the order of MetricId. Built once; thread-safe.
std::span<const MetricRow> MetricTable();

// The row of `id`.
const MetricRow& RowOf(MetricId id);

}  // namespace muond
