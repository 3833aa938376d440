// Buddies: what goes to the daemon that holds a copy of this one's state, and what comes back from
// it. docs/checkpoints.md tells the story.
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "proto/steady_time.h"
#include "server/buddy/buddy_fetch.h"
#include "server/buddy/buddy_state.h"
#include "server/run/control.h"
#include "server/run/run.h"
#include "server/run/run_create.h"
#include "spdlog/spdlog.h"

namespace muond {

// ---- To the buddy -----------------------------------------------------------------------------

// Before anybody else knows the run.
void Run::OpenBuddy() {
  if (context_.buddy_steps == 0 || context_.peers->count() < 2) return;
  held_ = std::make_unique<HeldState>([metrics = context_.metrics](std::int64_t bytes) {
    metrics->AddMemory(MemoryKind::kBuddy, bytes);
  });
  const auto self = weak_from_this();
  BuddySender::Listener listener;
  listener.held = [self](const BuddyAttemptKey& attempt) {
    if (const auto run = self.lock()) run->OnHeld(attempt);
  };
  listener.wanted = [self] {
    const auto run = self.lock();
    return run == nullptr || run->OnSnapshotWanted();
  };
  listener.trouble = [self](int daemon, const absl::Status& status, const PeerPosition* position) {
    if (const auto run = self.lock()) run->OnBuddyTrouble(daemon, status, position);
  };
  listener.sent = [self](std::int64_t bytes) {
    if (const auto run = self.lock()) run->metrics_->OnBuddySent(bytes);
  };
  listener.waited = [self](absl::Duration elapsed) {
    if (const auto run = self.lock()) run->metrics_->ObserveBuddyWait(elapsed);
  };
  buddy_ = std::make_unique<BuddySender>(context_.peers, context_.buddy_steps,
                                         std::move(listener));
}

// The run ends.
void Run::CloseBuddy() {
  buddy_.reset();
  MutexLock lock(mutex_);
  DropBuddyCopies();
}

// While the engines are those that it was made for.
void Run::DropBuddyCopies() {
  if (buddy_copies_ == nullptr) return;
  context_.metrics->AddMemory(MemoryKind::kBuddy, -engines_->state_bytes());
  buddy_copies_ = nullptr;
}

// The lock is held; all state was just forgotten, or has grown. StartBuddy tells the sender of what
// comes.
void Run::ForgetBuddy() {
  if (buddy_ == nullptr) return;
  held_->Clear();
  buddy_snapshot_ = buddy_held_ = -1;
}

// The lock is held. By its introduction the buddy knows which parameters this daemon has.
void Run::StartBuddy() {
  buddy_->Restart(context_.peers->Introduction(name(), PlanName()), machine_->lineage(),
                  buddy_held_);
}

std::int64_t Run::LineageLocked() const {
  return machine_ == nullptr ? start_.lineage : machine_->lineage();
}

BuddyAttemptKey Run::AttemptKey(std::int64_t attempt) const {
  return {machine_->next_step(), machine_->generation(), attempt};
}

// The lock is held. What will be skipped need not be kept.
void Run::SendGradient(const ReduceEffect& effect, const ReduceRequest& request,
                       const ReducedGradient& result) {
  if (effect.attempt != machine_->attempt() || result.nonfinite > 0 || result.state_overflow) {
    return;
  }
  BuddyPiece piece{.state = effect.state, .dtype = Dtype::kF32, .divisor = effect.divisor};
  const bool in_place =
      request.layers.size() == 1 && engines_->StagingBackend(effect.state).host_memory();
  if (request.layers.size() == 1) piece.dtype = request.layers[0].dtype;
  piece.bytes = engines_->PackedElements(effect.state) *
                static_cast<std::int64_t>(DtypeBytes(piece.dtype));
  const BuddyAttemptKey key = AttemptKey(effect.attempt);
  if (in_place) {
    // Nobody writes to a layer that is complete, and its memory is not used again while it is held.
    piece.data = static_cast<const char*>(request.layers[0].memory->data());
    piece.keepalive = request.layers[0].memory;
    buddy_->Add(key, std::move(piece));
    return;
  }
  const std::shared_ptr<char[]> copy(new char[static_cast<std::size_t>(piece.bytes)]);
  piece.data = copy.get();
  piece.keepalive = copy;
  engines_->CopyGradient(effect.state, copy.get(),
                         [self = shared_from_this(), life = life_, key,
                          piece = std::move(piece)](const absl::Status& status) {
                           if (!status.ok()) {
                             return self->FailEngine(life, std::string(status.message()));
                           }
                           MutexLock lock(self->mutex_);
                           if (life == self->life_ && self->machine_->attempt() == key.number) {
                             self->buddy_->Add(key, piece);
                           }
                         });
}

// On the sender's thread.
void Run::OnHeld(const BuddyAttemptKey& attempt) {
  After after;
  {
    MutexLock lock(mutex_);
    if (machine_ == nullptr || AttemptKey(attempt.number) != attempt) return;
    Effects effects;
    machine_->OnHeld(attempt.number, effects);
    Carry(effects, after);
  }
  CallAll(after);
}

void Run::OnBuddyTrouble(int daemon, const absl::Status& status, const PeerPosition* position) {
  if (position != nullptr) OnPeerAnswer(daemon, *position, {});
  // It is not where this daemon is, or the line is bad: it is asked again.
  if (absl::IsAborted(status) || absl::IsDataLoss(status)) return;
  OnPeerTrouble(daemon, status);
}

bool Run::OnSnapshotWanted() {
  MutexLock lock(mutex_);
  // Once the run is stopped the engines' threads may be gone.
  const bool steps = machine_ != nullptr && running_ && stopped_.ok() && lost_.empty();
  return steps && !committing_ && SnapshotForBuddy();
}

// The lock is held, no commit is under way: as StartImage. False: the last one is still on its way.
bool Run::SnapshotForBuddy() {
  if (buddy_copies_ == nullptr) {
    buddy_copies_ = engines_->MakeStateCopies();
    context_.metrics->AddMemory(MemoryKind::kBuddy, engines_->state_bytes());
  }
  if (buddy_copies_.use_count() > 1) return false;
  const std::int64_t version = machine_->version();
  buddy_snapshot_ = version;
  engines_->CopyState(buddy_copies_, [self = shared_from_this(), life = life_, version,
                                      of = &registry(),
                                      copies = buddy_copies_](const absl::Status& status) {
    if (!status.ok()) return self->FailEngine(life, std::string(status.message()));
    MutexLock lock(self->mutex_);
    // Parameters that were added since are not in it. Registries stay, so one is as good as a name.
    if (life == self->life_ && of == &self->registry()) self->buddy_->Snapshot(version, copies);
  });
  return true;
}

// ---- For the daemon before this one -----------------------------------------------------------

// The lock is held.
void Run::RecordStep(const StepOutcome& outcome) {
  if (held_ == nullptr) return;
  v1::BuddyStep step;
  step.set_step(outcome.step);
  step.set_generation(machine_->decided_in());
  step.set_applied(outcome.applied);
  step.set_clip_coefficient(outcome.clip_coefficient);
  if (outcome.applied) {
    ToProto(machine_->muon(), *step.mutable_muon());
    ToProto(machine_->adamw(), *step.mutable_adamw());
  }
  held_->OnStep(std::move(step));
}

// The lock is held.
absl::Status Run::CheckBuddy(const v1::PeerRun& peer, std::int64_t lineage) const {
  if (held_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": this daemon holds no copies for others: set buddy-steps alike on all",
        name()));
  }
  const int count = context_.peers->count();
  if (BuddyOf(static_cast<int>(peer.daemon()), count) != context_.peers->self()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": daemon %d: its buddy is daemon %d, not this one", name(),
                        peer.daemon(), BuddyOf(static_cast<int>(peer.daemon()), count)));
  }
  if (HasState() && lineage == LineageLocked()) return absl::OkStatus();
  return absl::AbortedError(absl::StrFormat(
      "run \"%s\": buddy: state of lineage %d: this daemon has %s", name(), lineage,
      HasState() ? absl::StrFormat("that of %d", LineageLocked()) : "none"));
}

absl::StatusOr<v1::BuddyPutReply> Run::BuddyPut(const v1::BuddyPutRequest& request) {
  std::int64_t life = 0;
  {
    MutexLock lock(mutex_);
    MUOND_RETURN_IF_ERROR(CheckBuddy(request.peer(), request.lineage()));
    life = held_->life();
  }
  auto reply = held_->Put(request, life);
  if (!reply.ok()) return Refused(name(), reply.status());
  return reply;
}

absl::StatusOr<v1::BuddyIndexReply> Run::BuddyIndex(const v1::BuddyIndexRequest& request) {
  v1::BuddyControl control;
  {
    MutexLock lock(mutex_);
    MUOND_RETURN_IF_ERROR(CheckBuddy(request.peer(), request.lineage()));
    const std::int64_t version = machine_ == nullptr ? start_.next_step : machine_->version();
    if (version != request.version() || committing_) {
      return absl::UnavailableError(absl::StrFormat(
          "run \"%s\": buddy: version %d is asked for, this daemon is at %d", name(),
          request.version(), version));
    }
    if (machine_ != nullptr) {
      control = ToProto(machine_->memory());
    } else if (start_.memory) {
      control = ToProto(*start_.memory);
    }
  }
  auto reply = held_->Index(request.version());
  if (!reply.ok()) return Refused(name(), reply.status());
  *reply->mutable_control() = std::move(control);
  return reply;
}

absl::StatusOr<v1::BuddyReadReply> Run::BuddyRead(const v1::BuddyReadRequest& request) const {
  if (held_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": this daemon holds no copies for others: set buddy-steps alike on all",
        name()));
  }
  auto reply = held_->Read(request);
  if (!reply.ok()) return Refused(name(), reply.status());
  return reply;
}

// ---- Back from the buddy ----------------------------------------------------------------------

absl::Status Run::ReadItem(std::int64_t item, char* out, std::int64_t bytes) {
  Peers& peers = *context_.peers;
  return muond::ReadItem(peers, peers.Introduction(name(), PlanName()), item, out, bytes, [this] {
    MutexLock lock(mutex_);
    return stopped_;
  });
}

// 0 for what is no parameter with state here.
std::int64_t Run::PackedElements(int state) const {
  MutexLock lock(mutex_);
  const bool known = state >= 0 && state < std::ssize(spec().parameters);
  return known ? engines_->PackedElements(state) : 0;
}

absl::StatusOr<std::vector<ReplayStep>> Run::ReadSteps(const v1::BuddyIndexReply& index,
                                                            std::int64_t& bytes) {
  std::vector<ReplayStep> steps;
  std::int64_t item = index.tensors_size();
  for (const v1::BuddyStep& message : index.steps()) {
    if (!message.applied()) continue;
    ReplayStep step{.step = message.step(),
                    .clip_coefficient = message.clip_coefficient(),
                    .muon = FromProto(message.muon()),
                    .adamw = FromProto(message.adamw()),
                    .gradients = {}};
    for (const v1::BuddyGradient& gradient : message.gradients()) {
      MUOND_ASSIGN_OR_RETURN(const Dtype dtype, FromProto(gradient.dtype()));
      const auto state = static_cast<int>(gradient.state());
      const std::int64_t elements = PackedElements(state);
      if (gradient.bytes() != elements * static_cast<std::int64_t>(DtypeBytes(dtype))) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "run \"%s\": buddy: a gradient of parameter %d has %d bytes, expected %d elements",
            name(), state, gradient.bytes(), elements));
      }
      ReduceRequest request{.state = state, .layers = {}, .divisor = gradient.divisor()};
      std::shared_ptr<StagingBuffer> memory;
      {
        MutexLock lock(mutex_);
        MUOND_ASSIGN_OR_RETURN(memory, engines_->AllocateStaging(state, elements, dtype));
      }
      MUOND_RETURN_IF_ERROR(
          ReadItem(item++, static_cast<char*>(memory->data()), gradient.bytes()));
      bytes += gradient.bytes();
      request.layers.push_back({.memory = std::move(memory), .dtype = dtype});
      step.gradients.push_back(std::move(request));
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

absl::StatusOr<v1::BuddyRecoverReply> Run::StageFromBuddy(std::int64_t version,
                                                          std::int64_t lineage) {
  if (buddy_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": recover: buddy-steps is 0 on this daemon", name()));
  }
  v1::BuddyIndexRequest request;
  *request.mutable_peer() = context_.peers->Introduction(name(), PlanName());
  request.set_version(version);
  request.set_lineage(lineage);
  MUOND_ASSIGN_OR_RETURN(const v1::BuddyIndexReply index, AskIndex(*context_.peers, request));
  const absl::Time start = SteadyNow();
  StagedState staged{.name = kFromBuddy, .copies = MakeStateCopies(), .control = {}, .replay = {}};
  MUOND_ASSIGN_OR_RETURN(const auto tensors, MatchTensors(index.tensors(), *staged.copies));
  v1::BuddyRecoverReply reply;
  std::int64_t bytes = 0, item = 0;
  for (const TensorRef& ref : tensors) {
    MUOND_RETURN_IF_ERROR(ReadItem(item++, reinterpret_cast<char*>(ref.data), ref.bytes));
    bytes += ref.bytes;
  }
  MUOND_ASSIGN_OR_RETURN(staged.replay, ReadSteps(index, bytes));
  staged.control = ControlOf(FromProto(index.control()), 0, version);
  staged.held = index.snapshot();
  reply.set_bytes(bytes);
  reply.set_steps(std::ssize(staged.replay));
  const int buddy = BuddyOf(daemon(), context_.peers->count());
  spdlog::warn(
      "run \"{}\": its state comes back from buddy \"{}\": version {} and {} steps since, {} bytes "
      "in {}",
      name(), daemons()[buddy], index.snapshot(), reply.steps(), bytes,
      absl::FormatDuration(SteadyNow() - start));
  MutexLock lock(mutex_);
  staged_ = std::move(staged);
  return reply;
}

// The lock is held; the snapshot is on its way into the engines, which take the steps after it.
void Run::Replay(std::vector<ReplayStep> steps) {
  for (ReplayStep& step : steps) {
    const auto failed = [self = shared_from_this(), life = life_,
                         number = step.step](const absl::Status& status) {
      self->FailEngine(life, absl::StrFormat("step %d, taken again: %s", number,
                                             std::string(status.message())));
    };
    engines_->SetHyperparameters(step.muon, step.adamw);
    CommitRequest commit{.clip_coefficient = step.clip_coefficient,
                         .absent = {},
                         .muon = step.muon,
                         .adamw = step.adamw};
    for (int i = 0; i < std::ssize(routing().parameters); ++i) {
      if (routing().parameters[i].state == i) commit.absent.insert(i);
    }
    for (ReduceRequest& gradient : step.gradients) {
      commit.absent.erase(gradient.state);
      engines_->Reduce(std::move(gradient),
                       [failed](const ReduceRequest&, const absl::StatusOr<ReducedGradient>& done) {
                         if (!done.ok()) failed(done.status());
                       });
    }
    engines_->Commit(std::move(commit), [failed](const absl::StatusOr<Committed>& done) {
      if (!done.ok()) return failed(done.status());
      if (!done->report.failure.empty()) failed(absl::InternalError(done->report.failure));
    });
  }
}

absl::Status Run::RecoverOnAll(absl::Time deadline) {
  const RaiseHooks own{
      .prepare = [&](std::int64_t generation) { return Prepare(generation, {.recover = true}); },
      .raise = [&](const RaiseOrder& order) { return Raise(order); },
      .recover = [&](std::int64_t version,
                     std::int64_t lineage) { return StageFromBuddy(version, lineage).status(); }};
  return RecoverGeneration(*context_.peers, name(), PlanName(), Position().generation, own,
                           deadline);
}

}  // namespace muond
