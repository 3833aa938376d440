// Generations of a run: promises, raising one on all daemons, what is kept of it on disk, and
// taking up what others left half done.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/steady_time.h"
#include "server/run/run.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

constexpr absl::Duration kLongestPause = absl::Minutes(1);

}  // namespace

std::int64_t Run::GenerationLocked() const {
  return machine_ == nullptr ? start_.generation : machine_->generation();
}

std::int64_t Run::PromisedLocked() const {
  return machine_ == nullptr ? promised_ : machine_->promised();
}

// ---- On disk ----------------------------------------------------------------------------------

// Before anybody else knows the run: a former life of this daemon may have voted in the generation
// that it had reached, and its messages may still be on their way. What it may have voted in, this
// one does not vote in.
absl::Status Run::RecallGeneration() {
  MUOND_ASSIGN_OR_RETURN(const auto record, generation_file_.Load());
  MutexLock lock(mutex_);
  if (record) {
    const std::int64_t next = std::max(record->promised, record->generation + 1);
    const bool alone = context_.peers->count() == 1;
    // With others it takes all of them to raise it.
    start_.generation = alone ? next : record->generation;
    promised_ = next;
    spdlog::info("run \"{}\": a former life of this daemon had reached generation {}: {} {}",
                 name(), record->generation,
                 alone ? "this one starts in" : "nothing is voted on below", next);
    if (!alone) WatchPromise();
  }
  return StoreGeneration();
}

// The lock is held.
absl::Status Run::StoreGeneration() {
  const GenerationRecord record{.generation = GenerationLocked(), .promised = PromisedLocked()};
  if (stored_ == record) return absl::OkStatus();
  const absl::Status stored = generation_file_.Store(record);
  if (!stored.ok()) {
    spdlog::error("run \"{}\": {}", name(), std::string(stored.message()));
    return absl::Status(stored.code(),
                        absl::StrFormat("run \"%s\": %s", name(), stored.message()));
  }
  stored_ = record;
  return absl::OkStatus();
}

void Run::ForgetGeneration() {
  MutexLock lock(mutex_);
  generation_file_.Remove();
}

// ---- The two rounds ---------------------------------------------------------------------------

absl::StatusOr<DaemonPromise> Run::Prepare(std::int64_t generation, const RaiseWish& wish) {
  MutexLock lock(mutex_);
  if (!stopped_.ok()) return stopped_;
  if (!wish.reinitialize && !wish.recover && !lost_.empty()) return NeedsRestore();
  if (wish.unless_made_anew && start_.lineage > wish.current) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": its state was made anew in generation %d, after the %d that the caller has "
        "seen: register again and look",
        name(), start_.lineage, wish.current));
  }
  MUOND_RETURN_IF_ERROR(CheckAdopt(wish.adopt));
  if (!wish.reinitialize && machine_ != nullptr && machine_->failed()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": has failed and needs a restore, a new generation does not "
                        "mend it: %s",
                        name(), machine_->failure()));
  }
  StepMachine::Promise promise{start_.next_step, {}, start_.lineage};
  if (machine_ != nullptr) {
    auto given = machine_->OnPrepare(generation);
    // Too low: whoever asks must go higher.
    if (!given.ok()) return absl::AbortedError(given.status().message());
    promise = *std::move(given);
  } else if (generation < std::max(start_.generation + 1, promised_)) {
    return absl::AbortedError(absl::StrFormat(
        "run \"%s\": prepare generation %d: this daemon is at %d and has promised %d", name(),
        generation, start_.generation, promised_));
  } else {
    // Nothing was ever voted here; the machine is told of the promise when it is made.
    promised_ = generation;
  }
  if (wish.recover && !HasState()) promise = {promise.next_step, {}, 0};
  WatchPromise();
  // A promise counts once it outlives the daemon.
  MUOND_RETURN_IF_ERROR(StoreGeneration());
  if (Grows(wish.adopt)) addition_->promised = true;
  return DaemonPromise{std::move(promise), std::ssize(spec().additions), adopted_};
}

absl::Status Run::Raise(const RaiseOrder& order) {
  After after;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (!stopped_.ok()) return stopped_;
    const std::int64_t now = GenerationLocked();
    if (order.generation > now) status = RaiseLocked(order, now, after);
    if (status.ok()) status = StoreGeneration();
    // It holds only when nothing of the old generation is under way.
    if (status.ok() && committing_) {
      status = absl::UnavailableError(absl::StrFormat(
          "run \"%s\": raise the generation to %d: step %d, whose verdict had fallen, is being "
          "committed",
          name(), order.generation, machine_->next_step()));
    }
  }
  CallAll(after);
  return status;
}

absl::Status Run::RaiseLocked(const RaiseOrder& order, std::int64_t now, After& after) {
  if (!order.restore.empty() && (!staged_ || staged_->name != order.restore)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": restore from \"%s\": this daemon has not staged it", name(), order.restore));
  }
  MUOND_RETURN_IF_ERROR(CheckAdopt(order.adopt));
  const bool grows = Grows(order.adopt);
  if (grows && !order.restore.empty()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": restore from \"%s\": parameters are being added at the same time", name(),
        order.restore));
  }
  Effects effects;
  if (machine_ != nullptr) {
    machine_->OnGeneration(order.generation, order.settled, effects);
  }
  const bool overtaken = machine_ == nullptr ? order.generation < promised_
                                             : machine_->generation() != order.generation;
  if (overtaken) {
    return absl::AbortedError(absl::StrFormat(
        "run \"%s\": raise the generation to %d: a higher one has been promised since", name(),
        order.generation));
  }
  spdlog::info("run \"{}\": generation {} raised to {}{}", name(), now, order.generation,
               !order.restore.empty() ? ", going on from " + order.restore
               : order.reinitialize   ? ", state is forgotten"
                                      : "");
  Carry(effects, after);
  start_.generation = promised_ = order.generation;
  if (order.reinitialize) {
    if (order.restore.empty()) staged_.reset();
    Reset(order.resume_step);
    if (order.lineage > 0) start_.lineage = order.lineage;
    if (staged_) Restore();
  } else if (order.recover && !lost_.empty()) {
    // It was others that had lost their state, and they get it back.
    lost_.clear();
    metrics_->SetState(StateLocked());
  }
  if (!grows && !adopt_after_commit_) {
    if (addition_ != nullptr) addition_->promised = false;
    return absl::OkStatus();
  }
  // Until it is the run's own, nobody may put another in its place.
  if (!committing_) {
    Adopt();
    return absl::OkStatus();
  }
  // The last step of before is being committed: nothing of the next comes in until it is.
  adopt_after_commit_ = true;
  running_ = false;
  return absl::OkStatus();
}

// The lock is held. What is in flight belongs to an earlier life and is dropped when it is done.
// The state that comes next, by initial values or otherwise, is of this generation's lineage.
void Run::Reset(std::int64_t resume_step) {
  start_.next_step = resume_step;
  start_.lineage = start_.generation;
  start_.memory.reset();
  restored_ = false;
  values_from_ = 0;
  image_.reset();
  periodic_version_ = -1;
  image_changed_.notify_all();
  ForgetBuddy();
  ++life_;
  lost_.clear();
  EndAttempt();
  committing_ = false;
  running_ = false;
  initial_ = {};
  initial_slices_.Clear(absl::AbortedError("the run is initialized anew"));
  if (machine_ != nullptr) MakeMachine();
  engines_->Reset([self = shared_from_this(), life = life_](const absl::Status& status) {
    if (!status.ok()) self->FailEngine(life, std::string(status.message()));
  });
  metrics_->SetState(StateLocked());
}

// ---- On all daemons ---------------------------------------------------------------------------

void Run::RaiseOnAll(const RaiseWish& wish, const std::string& reason, absl::Duration wait,
                     StatusCallback done) {
  spdlog::info("run \"{}\": raising generation {}: {}", name(), wish.current,
               reason.empty() ? "no reason given" : reason);
  const absl::Time deadline = SteadyNow() + wait;
  context_.peer_executor->Post([self = shared_from_this(), wish, deadline, done] {
    bool raised = false;  // somebody was faster
    {
      MutexLock lock(self->mutex_);
      // While a commit is awaited, what is to be adopted is not yet.
      raised = wish.current < self->GenerationLocked() && !self->Grows(wish.adopt);
    }
    done(raised ? absl::OkStatus() : self->RaiseHere(wish, deadline));
  });
}

absl::Status Run::RaiseHere(const RaiseWish& wish, absl::Time deadline) {
  const RaiseHooks own{
      .prepare = [&](std::int64_t generation) { return Prepare(generation, wish); },
      .raise = [&](const RaiseOrder& order) { return Raise(order); }};
  return RaiseGeneration(*context_.peers, name(), PlanName(), wish, own, deadline);
}

// The lock is held. No step ends between a promise and its raise: where whoever asked for it has
// gone, this daemon raises the generation itself after a while. Daemons wait differently long, so
// that one of them comes first.
void Run::WatchPromise() {
  const auto& peers = *context_.peers;
  const double turn = 1 + static_cast<double>(peers.self()) / peers.count();
  take_up_pause_ = std::min(std::max(take_up_pause_, peers.patience()), kLongestPause);
  take_up_.Set(take_up_pause_ * turn, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->TakeUpPromise();
  });
}

void Run::TakeUpPromise() {
  std::int64_t generation = 0;
  {
    MutexLock lock(mutex_);
    generation = GenerationLocked();
    const bool failed = machine_ != nullptr && machine_->failed();
    // Without its state a daemon can't take part in a generation that keeps the others'.
    if (!stopped_.ok() || !lost_.empty() || failed || PromisedLocked() <= generation) return;
  }
  RaiseOnAll({.current = generation}, "it was promised and nobody has raised it",
             context_.peers->patience(),
             [weak = weak_from_this()](const absl::Status& status) {
               const auto self = weak.lock();
               if (self == nullptr) return;
               MutexLock lock(self->mutex_);
               if (status.ok()) {
                 self->take_up_pause_ = absl::ZeroDuration();
                 return;
               }
               spdlog::warn("{}", std::string(status.message()));
               // It would be refused again, until the trainers or an operator see to it.
               if (absl::IsFailedPrecondition(status)) return;
               self->take_up_pause_ *= 2;
               self->WatchPromise();
             });
}

}  // namespace muond
