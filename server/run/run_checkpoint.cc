// The state of a run out into checkpoints and in from them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/steady_time.h"
#include "server/run/control.h"
#include "server/run/run.h"
#include "spdlog/spdlog.h"

namespace muond {

// The lock is held.
checkpoint::Control Run::ControlLocked() const {
  return ControlOf(machine_->memory(), machine_->generation(), machine_->version());
}

// The lock is held, no commit is under way. The copy is posted before the next commit can be: what
// it holds is this version.
void Run::StartImage() {
  auto image = std::make_shared<StateImage>();
  image->control = ControlLocked();
  // Of before parameters were added.
  if (spare_copies_ != nullptr && spare_copies_->size() != engines_->count()) {
    spare_copies_ = nullptr;
  }
  image->copies = spare_copies_ != nullptr ? std::move(spare_copies_)
                                           : engines_->MakeStateCopies();
  image_ = image;
  auto self = shared_from_this();
  engines_->CopyState(image->copies, [self, image](const absl::Status& status) {
    MutexLock lock(self->mutex_);
    for (const StateCopy& copy : *image->copies) {
      image->copy_seconds = std::max(image->copy_seconds, copy.seconds);
    }
    image->status = status;
    image->ready = true;
    self->image_changed_.notify_all();
  });
}

// The lock is held: a step was consumed.
void Run::OnVersion() {
  const std::int64_t version = machine_->version();
  const std::int64_t every = context_.checkpoint_every_steps;
  const bool periodic = every > 0 && version % every == 0 && stopped_.ok();
  if (lost_.empty() && (periodic || image_wanted_ == version)) {
    // One that nobody has taken yet is given up for the newer one, once it is whole.
    if (image_ != nullptr && image_->ready && spare_copies_ == nullptr) {
      spare_copies_ = std::move(image_->copies);
    }
    StartImage();
    if (periodic) {
      periodic_version_ = version;
      if (context_.checkpoint_wanted) context_.checkpoint_wanted();
    }
  }
  if (buddy_ != nullptr && lost_.empty() &&
      version - buddy_snapshot_ >= StepsBetweenSnapshots(context_.buddy_steps)) {
    SnapshotForBuddy();
  }
  image_changed_.notify_all();
}

absl::StatusOr<std::shared_ptr<StateImage>> Run::TakeImage(std::int64_t step,
                                                           absl::Time deadline) {
  const auto refused = [&](const std::string& why) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": checkpoint of version %d: %s", name(), step, why));
  };
  MutexLock lock(mutex_);
  for (;;) {
    if (!lost_.empty()) return refused("it needs a restore: " + lost_);
    if (machine_ == nullptr || !running_) return refused("it is opening");
    if (machine_->failed()) return refused("it has failed: " + machine_->failure());
    if (image_ != nullptr && image_->control.step == step) {
      if (image_->ready) {
        std::shared_ptr<StateImage> image = std::move(image_);
        image_.reset();
        if (!image->status.ok()) return image->status;
        return image;
      }
    } else if (machine_->version() > step || (machine_->version() == step && committing_)) {
      return refused(absl::StrFormat("it is at version %d", machine_->version()));
    } else if (machine_->version() == step) {
      StartImage();
    } else {
      image_wanted_ = step;
    }
    if (SteadyNow() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrFormat("run \"%s\": checkpoint of version %d: it is at version %d still", name(),
                          step, machine_->version()));
    }
    image_changed_.wait_for(lock, absl::ToChronoNanoseconds(deadline - SteadyNow()));
  }
}

std::shared_ptr<StateCopies> Run::MakeStateCopies() const {
  MutexLock lock(mutex_);
  return engines_->MakeStateCopies();
}

void Run::GiveBack(std::shared_ptr<StateImage> image) {
  MutexLock lock(mutex_);
  if (spare_copies_ == nullptr && context_.checkpoint_every_steps > 0) {
    spare_copies_ = std::move(image->copies);
  }
}

std::int64_t Run::periodic_version() const {
  MutexLock lock(mutex_);
  return periodic_version_;
}

void Run::Stage(const std::string& name, std::shared_ptr<StateCopies> copies,
                const checkpoint::Control& control) {
  MutexLock lock(mutex_);
  staged_.reset();
  // Copies of before parameters were added fit nothing any more.
  if (copies == nullptr || copies->size() != engines_->count()) return;
  staged_ =
      StagedState{.name = name, .copies = std::move(copies), .control = control, .replay = {}};
}

// The lock is held; all state was just forgotten.
void Run::Restore() {
  const checkpoint::Control& control = staged_->control;
  const StepMemory memory{
      .scaler = {.scale = control.scaler.scale,
                 .good_steps = control.scaler.good_steps,
                 .hysteresis_left = control.scaler.hysteresis_left,
                 .overflows_at_minimum = control.scaler.overflows_at_minimum},
      .muon = control.muon,
      .adamw = control.adamw,
      .applied_steps = control.counters.applied_steps,
      .skipped_steps = control.counters.skipped_steps,
      .consecutive_skips = control.counters.consecutive_skips,
      .last_outcome = control.last_outcome};
  start_.memory = memory;
  restored_ = true;
  buddy_snapshot_ = buddy_held_ = staged_->held;
  if (machine_ != nullptr) MakeMachine();
  StartIfReady();
  metrics_->SetState(StateLocked());
  spdlog::info("run \"{}\": restored from {}: the next step is {}", name(), staged_->name,
               control.step);
  engines_->RestoreState(
      staged_->copies,
      [self = shared_from_this(), life = life_](const absl::StatusOr<StateHealth>& health) {
        if (!health.ok()) return self->FailEngine(life, std::string(health.status().message()));
        MutexLock lock(self->mutex_);
        if (life == self->life_) self->PublishHealth({}, *health);
      });
  Replay(std::move(staged_->replay));
  staged_.reset();
}

absl::Status Run::RestoreOnAll(const std::string& name, std::int64_t step, absl::Time deadline) {
  return RaiseHere({.current = Position().generation,
                    .reinitialize = true,
                    .restore = {name, step}},
                   deadline);
}

void Run::ExpectRestore(std::int64_t step) {
  MutexLock lock(mutex_);
  start_.next_step = std::max(start_.next_step, step);
  LoseState("its state is in a checkpoint that is still to be restored");
}

}  // namespace muond
