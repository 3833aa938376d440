// The engine's thread of a simulated daemon: one job at a time, in the order they were posted.
#include "tests/simulation/daemon.h"

namespace muond::simulation {

bool Daemon::EngineFails() {
  if (world_.healed() || !world_.random().Chance(world_.scenario().faults.engine_failure)) {
    return false;
  }
  ++checker_.coverage.engine_failures;
  Feed([&](Effects& effects) { machine_->OnEngineFailure("out of memory", effects); });
  if (grow_after_commit_) Grow();
  return true;
}

void Daemon::RunNextJob() {
  if (engine_busy_ || jobs_.empty()) return;
  engine_busy_ = true;
  Later(world_.random().Between(50, world_.scenario().engine_slowest), [this, epoch = epoch_] {
    if (epoch != epoch_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    if (!machine_->failed() && !EngineFails()) {
      std::visit([&](const auto& effect) { Run(effect); }, job);
    } else {
      engine_busy_ = false;
    }
    RunNextJob();
  });
}

void Daemon::Run(const ReduceEffect& reduce) {
  engine_busy_ = false;
  if (reduce.attempt != machine_->attempt()) {
    // Nobody asks any more: an answer, and one of nonsense, must do no harm.
    if (world_.random().Chance(0.5)) return;
    Feed(
        [&](Effects& effects) { machine_->OnReduced(reduce.attempt, reduce.state, {7}, effects); });
    return;
  }
  const auto facts = engine_->Reduce(reduce, machine_->next_step());
  if (!facts.ok()) return checker_.Violation(std::string(facts.status().message()));
  Feed([&](Effects& effects) {
    machine_->OnReduced(reduce.attempt, reduce.state, *facts, effects);
  });
}

// The state changes before the machine hears of it: what happens in between must not mind.
void Daemon::Run(const CommitEffect& commit) {
  engine_->Commit(commit);
  applied_ = true;
  Check();
  Later(world_.random().Between(10, world_.scenario().engine_slowest), [this, epoch = epoch_] {
    if (epoch != epoch_) return;
    engine_busy_ = false;
    Feed([&](Effects& effects) { machine_->OnCommitted({}, effects); });
    if (grow_after_commit_) Grow();
    RunNextJob();
  });
}

}  // namespace muond::simulation
