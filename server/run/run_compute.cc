// What is computed for a step: handed to the engines, and what comes back from them.
#include <utility>

#include "absl/time/clock.h"
#include "server/run/run.h"
#include "spdlog/spdlog.h"

namespace muond {

void Run::CarryReduce(const ReduceEffect& effect) {
  ReduceRequest request{.state = effect.state, .divisor = effect.divisor};
  for (const Layer& layer : effect.layers) request.layers.push_back(layers_.at(layer));
  auto self = shared_from_this();
  engines_->Reduce(std::move(request),
                   [self, effect, life = life_](ReduceRequest done,
                                                const absl::StatusOr<ReducedGradient>& result) {
                     self->FinishReduce(life, effect, std::move(done), result);
                   });
}

// On an executor's thread.
void Run::FinishReduce(std::int64_t life, const ReduceEffect& effect, ReduceRequest request,
                       const absl::StatusOr<ReducedGradient>& result) {
  if (!result.ok()) return FailEngine(life, std::string(result.status().message()));
  observer_->OnReduced(*result);
  After after;
  {
    MutexLock lock(mutex_);
    if (life != life_) return;
    CountWorkspace();
    if (buddy_ != nullptr) SendGradient(effect, request, *result);
    if (result->layers_free) ReleaseLayers(effect, request);
    Effects effects;
    machine_->OnReduced(effect.attempt, effect.state,
                        {.nonfinite = result->nonfinite,
                         .block_sums = result->block_sums,
                         .state_overflow = result->state_overflow},
                        effects);
    Carry(effects, after);
  }
  CallAll(after);
}

// The lock is held. The bytes are elsewhere now: the memory is for the tensors that follow.
void Run::ReleaseLayers(const ReduceEffect& effect, ReduceRequest& request) {
  for (std::size_t i = 0; i < effect.layers.size(); ++i) {
    const std::shared_ptr<StagingBuffer> memory = std::move(request.layers[i].memory);
    // Another attempt has others.
    const auto found = layers_.find(effect.layers[i]);
    if (found == layers_.end() || found->second.memory != memory) continue;
    staging_.Release(std::move(found->second.memory));
    found->second.memory = nullptr;
  }
}

void Run::CarryCommit(const CommitEffect& effect) {
  CommitRequest request{.clip_coefficient = effect.clip_coefficient,
                        .absent = effect.absent,
                        .muon = effect.muon,
                        .adamw = effect.adamw,
                        .sample = observer_->Samples(machine_->next_step()),
                        .targets = targets_};
  observer_->OnVerdict(absl::Now());
  committing_ = true;
  auto self = shared_from_this();
  engines_->Commit(std::move(request),
                   [self, life = life_](const absl::StatusOr<Committed>& result) {
                     self->FinishCommit(life, result);
                   });
}

// On an executor's thread.
void Run::FinishCommit(std::int64_t life, const absl::StatusOr<Committed>& result) {
  if (!result.ok()) return FailEngine(life, std::string(result.status().message()));
  After after;
  {
    MutexLock lock(mutex_);
    if (life != life_) return;
    committing_ = false;
    const CommitReport& report = result->report;
    PublishHealth(report, result->health);
    if (report.failure.empty()) {
      totals_.newton_schulz_calls += report.newton_schulz_calls;
      totals_.newton_schulz_fallbacks += report.newton_schulz_fallbacks;
    }
    Effects effects;
    machine_->OnCommitted({.newton_schulz_calls = report.newton_schulz_calls,
                           .newton_schulz_fallbacks = report.newton_schulz_fallbacks,
                           .zero_inputs = report.zero_inputs,
                           .failure = report.failure},
                          effects);
    if (machine_->failed()) OnFailed();
    Carry(effects, after);
    if (adopt_after_commit_) Adopt();
  }
  CallAll(after);
}

// `life`: of what failed. What was posted before all state was forgotten concerns nobody any more.
void Run::FailEngine(std::int64_t life, const std::string& reason) {
  After after;
  {
    MutexLock lock(mutex_);
    if (life != life_ || machine_ == nullptr) return;
    committing_ = false;
    if (machine_->failed()) return;  // of many devices one was first
    Effects effects;
    machine_->OnEngineFailure(reason, effects);
    OnFailed();
    Carry(effects, after);
    if (adopt_after_commit_) Adopt();
  }
  CallAll(after);
}

void Run::OnFailed() {
  spdlog::error("run \"{}\": failed: {}", name(), machine_->failure());
  metrics_->OnStepFailed(absl::Now());
  metrics_->SetState(StateLocked());
}

}  // namespace muond
