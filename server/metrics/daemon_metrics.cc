#include "server/metrics/daemon_metrics.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "prometheus/text_serializer.h"
#include "server/metrics/process_metrics.h"

namespace muond {
namespace {

using enum MetricId;

// Index of an enumerator in the vector of its label's series.
template <typename Enum>
std::size_t At(Enum value) {
  return static_cast<std::size_t>(value);
}

// With these alerts reckon, or every client meets them some time.
constexpr absl::StatusCode kCommonCodes[] = {
    absl::StatusCode::kOk,
    absl::StatusCode::kCancelled,
    absl::StatusCode::kUnknown,
    absl::StatusCode::kInvalidArgument,
    absl::StatusCode::kDeadlineExceeded,
    absl::StatusCode::kFailedPrecondition,
    absl::StatusCode::kUnavailable,
    absl::StatusCode::kInternal};

}  // namespace

RpcMetrics::RpcMetrics(MetricFamilies* families, LabelValues method, std::atomic<int>* rare)
    : series_(families),
      method_(std::move(method)),
      rare_(rare),
      started_(series_.AddCounter(kGrpcServerStarted, method_)),
      handled_(RowOf(kGrpcServerHandled).labels.back().values.size()),
      handling_(series_.AddHistogram(kGrpcServerHandling, method_)) {
  for (const absl::StatusCode code : kCommonCodes) Make(At(code));
}

void RpcMetrics::Make(std::size_t code) {
  LabelValues values = method_;
  values.emplace_back(RowOf(kGrpcServerHandled).labels.back().values[code]);
  handled_[code] = series_.AddCounter(kGrpcServerHandled, values);
}

prometheus::Counter* RpcMetrics::HandledAs(std::size_t code) {
  MutexLock lock(mutex_);
  if (code >= handled_.size()) code = At(absl::StatusCode::kUnknown);
  if (handled_[code] == nullptr) {
    if (rare_->fetch_add(1) >= kRareCodeSeries) return handled_[At(absl::StatusCode::kUnknown)];
    Make(code);
  }
  return handled_[code];
}

void RpcMetrics::OnHandled(absl::StatusCode code, absl::Duration elapsed) {
  HandledAs(At(code))->Increment();
  handling_->Observe(std::max(0.0, absl::ToDoubleSeconds(elapsed)));
}

DaemonMetrics::DaemonMetrics(const BuildInfo& build, const BackendInfo& backend)
    : families_(std::make_shared<MetricFamilies>()),
      series_(families_.get()),
      ready_(series_.AddGauge(kReady)),
      log_messages_(series_.AddCounters(kLogMessages)),
      phases_(series_.AddHistograms(kStepPhase)),
      queues_(series_.AddGauges(kQueueDepth)),
      peer_rtt_(series_.AddHistogram(kPeerRtt)),
      transport_choices_(series_.AddCounters(kTransportChoices)),
      arenas_attached_(series_.AddGauge(kTransportConnections, {"arena"})),
      ipc_attached_(series_.AddGauge(kTransportConnections, {"cuda-ipc"})),
      pairs_attached_(series_.AddGauge(kTransportConnections, {"nccl"})) {
  for (const std::string_view from : RowOf(kTransportFallbacks).labels[0].values) {
    transport_fallbacks_[std::string(from)] =
        series_.AddCounters(kTransportFallbacks, {std::string(from), "grpc"});
  }
  series_.AddGauge(kBuildInfo, {build.version, build.revision, build.cuda, build.compiler})->Set(1);
  for (std::size_t device = 0; device < backend.models.size(); ++device) {
    const std::string& model = backend.models[device];
    series_.AddGauge(kBackendInfo, {backend.backend, std::to_string(device), model})->Set(1);
  }
  for (const std::string_view path : RowOf(kTransportBytes).labels[0].values) {
    transport_bytes_.push_back(series_.AddCounters(kTransportBytes, {std::string(path)}));
    transport_messages_.push_back(series_.AddCounters(kTransportMessages, {std::string(path)}));
    transport_errors_.push_back(series_.AddCounters(kTransportErrors, {std::string(path)}));
  }
  for (const std::string_view kind : RowOf(kMemory).labels[0].values) {
    const char* location = !backend.device_memory ? "host"
                           : kind == "arena"      ? "host"
                           : kind == "buddy"      ? "host"
                           : kind == "staging"    ? "pinned"
                                                  : "device";
    memory_.push_back(series_.AddGauge(kMemory, {std::string(kind), location}));
  }
}

std::unique_ptr<RunMetrics> DaemonMetrics::OpenRun(RunMetrics::Opening opening) {
  return std::make_unique<RunMetrics>(families_, std::move(opening));
}

void DaemonMetrics::OnLogMessage(LogSeverity severity) {
  log_messages_[At(severity)]->Increment();
}

void DaemonMetrics::ObservePhase(StepPhase phase, absl::Duration elapsed) {
  phases_[At(phase)]->Observe(std::max(0.0, absl::ToDoubleSeconds(elapsed)));
}

void DaemonMetrics::OnTransfer(TransportPath path, TransportDirection direction,
                               std::int64_t bytes) {
  transport_messages_[At(path)][At(direction)]->Increment();
  if (bytes > 0) {
    transport_bytes_[At(path)][At(direction)]->Increment(static_cast<double>(bytes));
  }
}

void DaemonMetrics::OnTransportError(TransportPath path, TransportError reason) {
  transport_errors_[At(path)][At(reason)]->Increment();
}

void DaemonMetrics::ObservePeerRtt(absl::Duration elapsed) {
  peer_rtt_->Observe(std::max(0.0, absl::ToDoubleSeconds(elapsed)));
}

void DaemonMetrics::OnTransportChoice(TransportPath path) {
  transport_choices_[At(path)]->Increment();
}

void DaemonMetrics::OnTransportFallback(TransportFallback reason, TransportPath from) {
  const std::string path(RowOf(kTransportBytes).labels[0].values[At(from)]);
  if (const auto found = transport_fallbacks_.find(path); found != transport_fallbacks_.end()) {
    found->second[At(reason)]->Increment();
  }
}

void DaemonMetrics::SetGpuArenas(std::int64_t attached, std::int64_t bytes) {
  ipc_attached_->Set(static_cast<double>(attached));
  memory_[At(MemoryKind::kGpuArena)]->Set(static_cast<double>(bytes));
}

void DaemonMetrics::SetNcclPairs(std::int64_t joined) {
  pairs_attached_->Set(static_cast<double>(joined));
}

void DaemonMetrics::SetArenas(std::int64_t attached, std::int64_t bytes) {
  arenas_attached_->Set(static_cast<double>(attached));
  memory_[At(MemoryKind::kArena)]->Set(static_cast<double>(bytes));
}

void DaemonMetrics::AddMemory(MemoryKind kind, std::int64_t bytes) {
  memory_[At(kind)]->Increment(static_cast<double>(bytes));
}

RpcMetrics& DaemonMetrics::Rpc(const std::string& service, const std::string& method,
                               const std::string& type) {
  MutexLock lock(mutex_);
  auto& slot = rpcs_[{type, service, method}];
  if (slot == nullptr) {
    slot = std::make_unique<RpcMetrics>(families_.get(), LabelValues{type, service, method},
                                        &rare_codes_);
  }
  return *slot;
}

std::string DaemonMetrics::Serialize() const {
  for (std::size_t i = 0; queue_depth_ != nullptr && i < queues_.size(); ++i) {
    queues_[i]->Set(queue_depth_(static_cast<QueueKind>(i)));
  }
  std::vector<prometheus::MetricFamily> families = families_->registry().Collect();
  for (prometheus::MetricFamily& family : CollectProcessMetrics()) {
    families.push_back(std::move(family));
  }
  // Collect leaves out nothing: a family without series (no run is open) has no business there.
  std::erase_if(families, [](const prometheus::MetricFamily& f) { return f.metric.empty(); });
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace muond
