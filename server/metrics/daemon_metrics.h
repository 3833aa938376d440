// The daemon's metrics: owner of all series, those of the daemon itself, and the exposition.
//
// Made once at start; every series of the daemon is there, at its first value, from the first
// scrape on. Thread-safe. The text is the Prometheus exposition format 0.0.4.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/mutex.h"
#include "server/metrics/run_metrics.h"
#include "server/metrics/series.h"

namespace muond {

struct BuildInfo {
  std::string version;   // "0.1.0"
  std::string revision;  // of the source; "unknown" outside a checkout
  std::string cuda;      // of the toolkit; "none" in a build without it
  std::string compiler;  // "g++ 12.2.0"
};

// What computes, and where its memory lies.
struct BackendInfo {
  std::string backend = "cpu";             // "cuda", "cpu" or "reference"
  std::vector<std::string> models = {""};  // one per device: "NVIDIA H200"; empty on the host
  bool device_memory = false;              // state on devices, staging pinned; else all on the host
};

// The enumerations below are in the order of the labels in the metric table.
enum class LogSeverity : std::uint8_t { kDebug, kInfo, kWarning, kError, kCritical };
enum class StepPhase : std::uint8_t {
  kReceive, kUnscale, kReduce, kMomentum, kNewtonSchulz, kAdamW, kApply, kSend
};
enum class TransportPath : std::uint8_t { kGrpc, kArena, kInProcess, kPointer, kCudaIpc, kNccl };
enum class TransportDirection : std::uint8_t { kReceived, kSent };
enum class TransportError : std::uint8_t {
  kTimeout, kReset, kChecksum, kProtocol, kVersion, kNoMemory
};
enum class QueueKind : std::uint8_t { kDevice, kPeer };
// Why a registration got gRPC and not a faster path.
enum class TransportFallback : std::uint8_t {
  kNotOffered, kNoSocket, kRefused, kNotAttached, kOtherGpu, kNamespace, kVersion
};
enum class MemoryKind : std::uint8_t {
  kMaster, kMomentum, kSecondMoment, kWorkspace, kStaging, kArena, kGpuArena, kBuddy
};

// The grpc_server_* series of one method: the status codes that calls commonly end with at 0 from
// the start, a rare one from its first call on. `rare` counts those of all methods: beyond
// kRareCodeSeries they are counted as Unknown, so that the daemon's series stay bounded.
inline constexpr int kRareCodeSeries = 64;
class RpcMetrics {
 public:
  RpcMetrics(MetricFamilies* families, LabelValues method, std::atomic<int>* rare);

  void OnStarted() { started_->Increment(); }
  // `elapsed` is the time since the start of the call.
  void OnHandled(absl::StatusCode code, absl::Duration elapsed);

 private:
  void Make(std::size_t code) MUOND_REQUIRES(mutex_);
  prometheus::Counter* HandledAs(std::size_t code);

  Mutex mutex_;
  SeriesSet series_ MUOND_GUARDED_BY(mutex_);
  const LabelValues method_;
  std::atomic<int>* const rare_;
  prometheus::Counter* started_;
  // By status code; null: none ended so yet.
  std::vector<prometheus::Counter*> handled_ MUOND_GUARDED_BY(mutex_);
  prometheus::Histogram* handling_;
};

class DaemonMetrics {
 public:
  explicit DaemonMetrics(const BuildInfo& build, const BackendInfo& backend = {});

  // The series of a run that opens; they go when the object does. It may outlive the daemon's.
  std::unique_ptr<RunMetrics> OpenRun(RunMetrics::Opening opening);

  void SetReady(bool ready) { ready_->Set(ready ? 1 : 0); }
  bool ready() const { return ready_->Value() > 0; }
  void OnLogMessage(LogSeverity severity);
  void ObservePhase(StepPhase phase, absl::Duration elapsed);

  // One payload message of `bytes` bytes went in or out.
  void OnTransfer(TransportPath path, TransportDirection direction, std::int64_t bytes);
  void OnTransportError(TransportPath path, TransportError reason);

  // Another daemon answered a vote after this long.
  void ObservePeerRtt(absl::Duration elapsed);
  // Asked at each exposition: how many jobs wait. Set once, before the first.
  void SetQueueDepth(std::function<double(QueueKind)> depth) { queue_depth_ = std::move(depth); }
  // A registration was given this path.
  void OnTransportChoice(TransportPath path);
  // ... or gRPC in the place of `from`: an arena, CUDA IPC or NCCL.
  void OnTransportFallback(TransportFallback reason, TransportPath from = TransportPath::kArena);
  // Of all trainers: how many have one, and the bytes of all.
  void SetArenas(std::int64_t attached, std::int64_t bytes);
  // The same for arenas of GPUs, and how many trainers have a pair of NCCL ranks.
  void SetGpuArenas(std::int64_t attached, std::int64_t bytes);
  void SetNcclPairs(std::int64_t joined);

  // Runs add what they allocate and subtract what they free; the gauge is the sum.
  void AddMemory(MemoryKind kind, std::int64_t bytes);

  // The series of one method, made at the first call. `service` is the full name
  // ("muond.v1.Optimizer"), `type` one of "unary", "client_stream", "server_stream", "bidi_stream".
  // The reference stays valid as long as this object. Only methods that the server registered may
  // be named: a client must not be able to make series.
  RpcMetrics& Rpc(const std::string& service, const std::string& method, const std::string& type);

  // The exposition of this moment: what GET /metrics answers.
  std::string Serialize() const;

 private:
  std::shared_ptr<MetricFamilies> families_;
  SeriesSet series_;
  prometheus::Gauge* ready_;
  std::vector<prometheus::Counter*> log_messages_;
  std::vector<prometheus::Histogram*> phases_;
  // By path, then by direction or reason.
  std::vector<std::vector<prometheus::Counter*>> transport_bytes_, transport_messages_,
      transport_errors_;
  std::vector<prometheus::Gauge*> memory_, queues_;
  prometheus::Histogram* peer_rtt_;
  std::function<double(QueueKind)> queue_depth_;
  std::vector<prometheus::Counter*> transport_choices_;  // by path
  // By the path that was not taken, then by reason.
  std::map<std::string, std::vector<prometheus::Counter*>> transport_fallbacks_;
  prometheus::Gauge *arenas_attached_, *ipc_attached_, *pairs_attached_;

  std::atomic<int> rare_codes_{0};
  Mutex mutex_;
  std::map<std::tuple<std::string, std::string, std::string>, std::unique_ptr<RpcMetrics>> rpcs_
      MUOND_GUARDED_BY(mutex_);
};

}  // namespace muond
