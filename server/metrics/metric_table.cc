#include "server/metrics/metric_table.h"

#include <string_view>
#include <vector>

#include "proto/check.h"

namespace muond {
namespace {

using enum MetricId;
using enum MetricType;

// 0.5 ms to 131 s by doubling: steps of a small model on loopback up to the step deadline.
std::vector<double> StepBuckets() {
  return {0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064,  0.128,  0.256,
          0.512,  1.024, 2.048, 4.096, 8.192, 16.384, 32.768, 65.536, 131.072};
}
// 0.1 ms to 26 s by factors of four: control calls up to a Finish that waits for other ranks.
std::vector<double> RpcBuckets() {
  return {0.0001, 0.0004, 0.0016, 0.0064, 0.0256, 0.1024, 0.4096, 1.6384, 6.5536, 26.2144};
}

// -1 to 1, finer at the ends, where gradients repeat momentum or contradict it.
std::vector<double> CosineBuckets() {
  return {-0.95, -0.75, -0.5, -0.3, -0.15, -0.05, 0.05, 0.15, 0.3, 0.5, 0.75, 0.95};
}
// By half decades: healthy training lies around 1e-3.
std::vector<double> RatioBuckets() {
  return {1e-6,   3.16e-6, 1e-5,   3.16e-5, 1e-4,   3.16e-4, 1e-3,
          3.16e-3, 0.01,   0.0316, 0.1,     0.316,  1.05};
}
// Around 0 for coefficients that converge, 0.3 to 0.45 for the quintic ones on full-rank input,
// towards 1 the fewer directions are alive; above 1.05 the iteration diverged.
std::vector<double> ResidualBuckets() {
  return {0.02, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.05, 2.5};
}

MetricLabel Run() { return {"run", {}}; }
MetricLabel Group() { return {"group", {}}; }
MetricLabel Algorithm() { return {"algorithm", {"muon", "adamw"}}; }
MetricLabel Transport() {
  return {"transport", {"grpc", "arena", "inprocess", "pointer", "cuda-ipc", "nccl"}};
}
MetricLabel Direction() { return {"direction", {"rx", "tx"}}; }
MetricLabel GrpcType() { return {"grpc_type", {}}; }
MetricLabel GrpcService() { return {"grpc_service", {}}; }
MetricLabel GrpcMethod() { return {"grpc_method", {}}; }
// In the order of the numeric status codes, spelled as in every other grpc_server_* exporter.
MetricLabel GrpcCode() {
  return {
      "grpc_code",
      {"OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound",
       "AlreadyExists", "PermissionDenied", "ResourceExhausted", "FailedPrecondition", "Aborted",
       "OutOfRange", "Unimplemented", "Internal", "Unavailable", "DataLoss", "Unauthenticated"}};
}

// clang-format off
std::vector<MetricRow> DaemonRows() {
  constexpr auto kSection = MetricSection::kDaemon;
  return {
      {kBuildInfo, "muond_build_info", kGauge, kSection,
       {{"version", {}}, {"revision", {}}, {"cuda", {}}, {"compiler", {}}}, "",
       "Build of the running daemon; always 1.", {}},
      {kBackendInfo, "muond_backend_info", kGauge, kSection,
       {{"backend", {"cuda", "cpu", "reference"}}, {"device", {}}, {"model", {}}}, "",
       "What computes, one series for each device of the daemon; always 1.", {}},
      {kReady, "muond_ready", kGauge, kSection, {}, "", "1 when the daemon accepts steps.", {}},
      {kLogMessages, "muond_log_messages_total", kCounter, kSection,
       {{"severity", {"debug", "info", "warning", "error", "critical"}}}, "",
       "Log lines written.", {}},
      {kProcessStartTime, "process_start_time_seconds", kGauge, kSection, {}, "seconds",
       "Unix time at which the process started.", {}},
      {kProcessCpu, "process_cpu_seconds_total", kCounter, kSection, {}, "seconds",
       "User and system CPU time that the process has used.", {}},
      {kProcessResidentMemory, "process_resident_memory_bytes", kGauge, kSection, {}, "bytes",
       "Resident memory of the process.", {}},
      {kProcessVirtualMemory, "process_virtual_memory_bytes", kGauge, kSection, {}, "bytes",
       "Virtual memory of the process.", {}},
      {kProcessOpenFds, "process_open_fds", kGauge, kSection, {}, "",
       "File descriptors that the process has open.", {}},
      {kProcessMaxFds, "process_max_fds", kGauge, kSection, {}, "",
       "Most file descriptors that the process may have open.", {}},
      {kMemory, "muond_memory_bytes", kGauge, kSection,
       {{"kind",
         {"master", "momentum", "second_moment", "workspace", "staging", "arena", "gpu_arena",
          "buddy"}},
        {"location", {"host", "device", "pinned"}}}, "bytes",
       "Memory that the daemon holds for its runs, by use.", {}},
      {kQueueDepth, "muond_queue_depth", kGauge, kSection,
       {{"queue", {"device", "peer"}}}, "",
       "Jobs that wait for a thread: of all devices, and for asking other daemons.", {}},
  };
}

std::vector<MetricRow> RunRows() {
  constexpr auto kSection = MetricSection::kRuns;
  return {
      {kRunActive, "muond_run_active", kGauge, kSection, {Run()}, "",
       "1 while the run is open.", {}},
      {kRunState, "muond_run_state", kGauge, kSection,
       {Run(), {"state", {"opening", "running", "checkpointing", "draining", "needs_restore",
                          "failed"}}}, "",
       "1 for the state that the run is in, 0 for every other.", {}},
      {kTrainersConnected, "muond_trainers_connected", kGauge, kSection, {Run()}, "",
       "Trainer ranks attached to the run.", {}},
      {kTrainersExpected, "muond_trainers_expected", kGauge, kSection, {Run()}, "",
       "Trainer ranks that the run needs.", {}},
      {kMuonExpected, "muond_muon_expected", kGauge, kSection, {Run()}, "",
       "1 if the run was configured to optimize something by Muon.", {}},
      {kParameters, "muond_parameters", kGauge, kSection, {Run(), Group(), Algorithm()}, "",
       "Logical tensors of the run, the same on all its daemons, tied ones once.", {}},
      {kParameterElements, "muond_parameter_elements", kGauge, kSection,
       {Run(), Group(), Algorithm()}, "",
       "Elements of the run, the same on all its daemons, tied ones once.", {}},
      {kShardElements, "muond_shard_elements", kGauge, kSection, {Run()}, "",
       "Elements of the run that this daemon owns.", {}},
      {kCheckpoints, "muond_checkpoints_total", kCounter, kSection,
       {Run(), {"result", {"saved", "save_failed", "restored", "restore_failed"}}}, "",
       "Checkpoints saved and restored, counted by daemon 0 of the run.", {}},
      {kCheckpointDuration, "muond_checkpoint_duration_seconds", kHistogram, kSection, {Run()},
       "seconds", "Time from the wish for a checkpoint until it was durable.", StepBuckets()},
      {kCheckpointSize, "muond_checkpoint_size_bytes", kGauge, kSection, {Run()}, "bytes",
       "Bytes of the newest checkpoint, all daemons' files; 0 before the first.", {}},
      {kCheckpointLastSuccess, "muond_checkpoint_last_success_timestamp_seconds", kGauge, kSection,
       {Run()}, "seconds",
       "Unix time at which the newest checkpoint was durable; 0 before the first.", {}},
      {kCheckpointLastStep, "muond_checkpoint_last_step", kGauge, kSection, {Run()}, "",
       "Version that the newest checkpoint holds; -1 before the first.", {}},
      {kCheckpointInterval, "muond_checkpoint_interval_seconds", kGauge, kSection, {Run()},
       "seconds", "Time between checkpoints that was asked for; 0: none by time.", {}},
      {kBuddySent, "muond_buddy_sent_bytes_total", kCounter, kSection, {Run()}, "bytes",
       "Snapshots and gradients that the buddy of this daemon has taken.", {}},
      {kBuddyWait, "muond_buddy_wait_seconds", kHistogram, kSection, {Run()}, "seconds",
       "Time that a step whose gradients were all reduced waited for the buddy's copy.",
       RpcBuckets()},
      {kBuddyRecoveries, "muond_buddy_recoveries_total", kCounter, kSection,
       {Run(), {"result", {"recovered", "failed"}}}, "",
       "Daemons' states brought back from buddies, counted by daemon 0 of the run; failed: it went "
       "on to a checkpoint.", {}},
  };
}

std::vector<MetricRow> StepRows() {
  constexpr auto kSection = MetricSection::kSteps;
  return {
      {kSteps, "muond_steps_total", kCounter, kSection,
       {Run(), {"outcome", {"applied", "skipped_overflow", "skipped_state_overflow",
                           "skipped_norm_threshold", "skipped_by_trainer", "failed"}}}, "",
       "Finished steps; a trainer's own skip for overflow counts as skipped_overflow.", {}},
      {kLastStep, "muond_last_step", kGauge, kSection, {Run()}, "",
       "Number of the last finished step; -1 before the first.", {}},
      {kLastStepTimestamp, "muond_last_step_timestamp_seconds", kGauge, kSection, {Run()},
       "seconds", "Unix time at which the last step finished; before the first, the run opened.",
       {}},
      {kStepInflight, "muond_step_inflight", kGauge, kSection, {Run()}, "",
       "1 while a step has begun and has no outcome.", {}},
      {kStepInflightStartTimestamp, "muond_step_inflight_start_timestamp_seconds", kGauge,
       kSection, {Run()}, "seconds",
       "Unix time at which the step in flight began; 0 while there is none.", {}},
      {kStepWaitingShards, "muond_step_waiting_shards", kGauge, kSection, {Run()}, "",
       "Gradient shards that the step in flight still waits for.", {}},
      {kStepDuration, "muond_step_duration_seconds", kHistogram, kSection, {Run()}, "seconds",
       "Time from the first event of a step to its outcome.", StepBuckets()},
      {kStepPhase, "muond_step_phase_seconds", kHistogram, kSection,
       {{"phase", {"receive", "unscale", "reduce", "momentum", "newton_schulz", "adamw", "apply",
                   "send"}}}, "seconds",
       "Time that a step spent in each phase, all runs together.", StepBuckets()},
      {kConsecutiveSkips, "muond_consecutive_skips", kGauge, kSection, {Run()}, "",
       "Steps skipped in a row up to now.", {}},
      {kDuplicateRequests, "muond_duplicate_requests_total", kCounter, kSection, {Run()}, "",
       "Requests that repeated one already carried out and were answered from memory.", {}},
      {kShardBusy, "muond_shard_busy_seconds_total", kCounter, kSection, {Run()}, "seconds",
       "Time that this daemon's devices computed for the run.", {}},
  };
}

std::vector<MetricRow> NumericsRows() {
  constexpr auto kSection = MetricSection::kNumerics;
  return {
      {kLossScale, "muond_loss_scale", kGauge, kSection, {Run()}, "",
       "Loss scale that the next step's gradients are made with.", {}},
      {kLossScaleMin, "muond_loss_scale_min", kGauge, kSection, {Run()}, "",
       "Floor of the dynamic loss scale; only runs that have one.", {}},
      {kLossScaleChanges, "muond_loss_scale_changes_total", kCounter, kSection,
       {Run(), {"direction", {"growth", "backoff"}}}, "", "Changes of the dynamic loss scale.", {}},
      {kLearningRate, "muond_learning_rate", kGauge, kSection, {Run(), Group()}, "",
       "Learning rate in force; that of the group's Muon half where it has one.", {}},
      {kGradNorm, "muond_grad_norm", kGauge, kSection, {Run()}, "",
       "Global gradient norm of the last finite step, unscaled, before clipping.", {}},
      {kGradClippedSteps, "muond_grad_clipped_steps_total", kCounter, kSection, {Run()}, "",
       "Applied steps whose gradient norm exceeded the clipping limit.", {}},
      {kNonfiniteElements, "muond_nonfinite_elements_total", kCounter, kSection,
       {Run(), {"kind", {"grad"}}}, "", "Non-finite elements seen in reduced gradients.", {}},
      {kNonfiniteTensors, "muond_nonfinite_tensors", kGauge, kSection,
       {Run(), {"kind", {"momentum", "second_moment", "master_weight"}}}, "",
       "State tensors with a non-finite element at the last commit.", {}},
      {kMomentumNorm, "muond_momentum_norm", kGauge, kSection, {Run(), Group()}, "",
       "Norm of the group's momenta: Muon's momentum and AdamW's first moment.", {}},
      {kWeightNorm, "muond_weight_norm", kGauge, kSection, {Run(), Group()}, "",
       "Norm of the group's master weights.", {}},
      {kNsCalls, "muond_newton_schulz_calls_total", kCounter, kSection, {Run(), Group()}, "",
       "Matrices orthogonalized in applied steps; each present Muon matrix counts once a step.",
       {}},
      {kNsOutcomes, "muond_newton_schulz_outcomes_total", kCounter, kSection,
       {Run(), Group(), {"outcome", {"ok", "low_rank", "diverged", "nonfinite"}}}, "",
       "How the first attempt at each orthogonalization came out; sums to the calls.", {}},
      {kNsSpecial, "muond_newton_schulz_special_total", kCounter, kSection,
       {Run(), Group(), {"kind", {"zero_input", "fallback"}}}, "",
       "Orthogonalizations of a zero matrix, and those redone by the fp32 standard path.", {}},
      {kNsResidual, "muond_newton_schulz_residual", kHistogram, kSection, {Run(), Group()}, "",
       "RMS residual of O^T O against the identity, of each matrix in sampled steps.",
       ResidualBuckets()},
      {kMuonUpdates, "muond_muon_updates_total", kCounter, kSection, {Run(), Group()}, "",
       "Orthogonalized updates that reached the weights.", {}},
      {kMomentumGradCosine, "muond_momentum_grad_cosine", kHistogram, kSection, {Run(), Group()},
       "", "Cosine of gradient and momentum before the update, of each tensor and step.",
       CosineBuckets()},
      {kUpdateRmsRatio, "muond_update_rms_ratio", kHistogram, kSection, {Run(), Group()}, "",
       "RMS(update) / RMS(weight) of each tensor, decay aside; AdamW's in sampled steps only.",
       RatioBuckets()},
      {kMomentumStale, "muond_momentum_stale_tensors", kGauge, kSection, {Run()}, "",
       "State tensors without a gradient for 100 applied steps or more.", {}},
      {kWorstValue, "muond_worst_value", kGauge, kSection,
       {Run(), {"measure", {"newton_schulz_residual", "update_rms_ratio", "grad_norm"}},
        {"rank", {"1", "2", "3", "4", "5"}}}, "",
       "The five largest values among the run's parameters at the last step that had one; "
       "muonctl params --worst names them.", {}},
  };
}

std::vector<MetricRow> TransportRows() {
  constexpr auto kSection = MetricSection::kTransport;
  return {
      {kTransportBytes, "muond_transport_bytes_total", kCounter, kSection,
       {Transport(), Direction()}, "bytes", "Payload bytes received and sent.", {}},
      {kTransportMessages, "muond_transport_messages_total", kCounter, kSection,
       {Transport(), Direction()}, "", "Payload messages received and sent.", {}},
      {kTransportErrors, "muond_transport_errors_total", kCounter, kSection,
       {Transport(),
        {"reason", {"timeout", "reset", "checksum", "protocol", "version", "no_memory"}}}, "",
       "Transfers that failed.", {}},
      {kPeerRtt, "muond_peer_rtt_seconds", kHistogram, kSection, {}, "seconds",
       "Time until another daemon answered a vote.", RpcBuckets()},
      {kTransportChoices, "muond_transport_choices_total", kCounter, kSection, {Transport()}, "",
       "Registrations by the data path that they were given.", {}},
      {kTransportFallbacks, "muond_transport_fallbacks_total", kCounter, kSection,
       {{"from", {"arena", "cuda-ipc", "nccl"}}, {"to", {"grpc"}},
        {"reason",
         {"not_offered", "no_socket", "refused", "not_attached", "other_gpu", "namespace",
          "version"}}}, "",
       "Registrations that got a slower data path than a trainer could have on this host.", {}},
      {kTransportConnections, "muond_transport_connections", kGauge, kSection, {Transport()}, "",
       "Trainers attached to the daemon by that path; gRPC's come and go and are not counted.", {}},
      {kGrpcServerStarted, "grpc_server_started_total", kCounter, kSection,
       {GrpcType(), GrpcService(), GrpcMethod()}, "", "Calls started on the server.", {}},
      {kGrpcServerHandled, "grpc_server_handled_total", kCounter, kSection,
       {GrpcType(), GrpcService(), GrpcMethod(), GrpcCode()}, "",
       "Calls completed on the server, whatever their status.", {}},
      {kGrpcServerHandling, "grpc_server_handling_seconds", kHistogram, kSection,
       {GrpcType(), GrpcService(), GrpcMethod()}, "seconds",
       "Time from the start of a call to its status.", RpcBuckets()},
  };
}
// clang-format on

std::vector<MetricRow> AllRows() {
  std::vector<MetricRow> all;
  for (auto rows : {DaemonRows(), RunRows(), StepRows(), NumericsRows(), TransportRows()}) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    MUOND_CHECK(static_cast<std::size_t>(all[i].id) == i, "metric table is not in enum order");
  }
  return all;
}

}  // namespace

std::string_view MetricTypeName(MetricType type) {
  switch (type) {
    case kCounter: return "counter";
    case kGauge: return "gauge";
    case kHistogram: return "histogram";
  }
  return "";
}

std::string_view MetricSectionName(MetricSection section) {
  switch (section) {
    case MetricSection::kDaemon: return "Daemon";
    case MetricSection::kRuns: return "Runs";
    case MetricSection::kSteps: return "Steps";
    case MetricSection::kNumerics: return "Numerics";
    case MetricSection::kTransport: return "Transport and RPC";
  }
  return "";
}

std::span<const MetricRow> MetricTable() {
  static const std::vector<MetricRow>& table = *new std::vector<MetricRow>(AllRows());
  return table;
}

const MetricRow& RowOf(MetricId id) { return MetricTable()[static_cast<std::size_t>(id)]; }

}  // namespace muond
