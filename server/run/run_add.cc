// Parameters that are added to the run: what ranks ask for, and the step border at which it is.
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "proto/convert.h"
#include "server/engine/digest.h"
#include "server/registry/spec_diff.h"
#include "server/run/registry_layout.h"
#include "server/run/run_create.h"
#include "spdlog/spdlog.h"

namespace muond {
namespace {

// Each keeps a registry and an engine of its own.
constexpr std::size_t kAdditionsMax = 256;

}  // namespace

std::string AdditionName(const Registry& registry) {
  return Digest128(registry.plan().hash + ToProto(registry.spec()).SerializeAsString());
}

// ---- What ranks ask for -----------------------------------------------------------------------

// The lock is held.
absl::Status Run::CheckAdding(std::int64_t rank, std::int64_t generation, std::size_t first) const {
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  if (!lost_.empty()) return NeedsRestore();
  MUOND_RETURN_IF_ERROR(CheckJoined(rank));
  const auto refuse = [&](absl::StatusCode code, const std::string& why) {
    return absl::Status(code, absl::StrFormat("run \"%s\": add parameters: %s", name(), why));
  };
  if (machine_ == nullptr) {
    return refuse(absl::StatusCode::kUnavailable,
                  absl::StrFormat("waiting for ranks [%s] to register",
                                  absl::StrJoin(registry().missing_ranks(), ", ")));
  }
  if (machine_->failed()) {
    return refuse(absl::StatusCode::kFailedPrecondition, "it has failed: " + machine_->failure());
  }
  if (first != spec().parameters.size()) {
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrFormat("rank %d knows %d parameters, the run has %d", rank, first,
                                  spec().parameters.size()));
  }
  if (spec().additions.size() >= kAdditionsMax) {
    return refuse(absl::StatusCode::kResourceExhausted,
                  absl::StrFormat("there were %d additions, the most that a run takes: add more "
                                  "parameters at a time",
                                  kAdditionsMax));
  }
  return absl::OkStatus();
}

// Without the lock: what an addition takes may be gigabytes.
absl::StatusOr<std::unique_ptr<PendingAddition>> Run::MakeAddition(
    const Registry& base, const ParameterAddition& wanted) {
  auto registry = base.WithAdded(wanted.groups, wanted.parameters, context_.limits,
                                 PlacementOf(context_, overlap_));
  if (!registry.ok()) return Refused(name(), registry.status());
  MUOND_RETURN_IF_ERROR(CheckFree(*registry, &base, context_));
  auto addition = std::make_unique<PendingAddition>();
  addition->registry = std::make_unique<Registry>(*std::move(registry));
  addition->name = AdditionName(*addition->registry);
  const Registry& grown = *addition->registry;
  const Engines* const here = engines_.get();  // any thread may call MakeAddition
  auto engines = here->MakeAddition(grown.spec(), grown.routing(),
                                    ShardsFrom(grown, base.spec().parameters.size()));
  if (!engines.ok()) return Refused(name(), engines.status());
  addition->engines = *std::move(engines);
  return addition;
}

// The lock is held. OK iff the ranks before asked for the same.
absl::Status Run::MatchAddition(std::int64_t rank, const ParameterAddition& wanted) const {
  const RunSpec& grown = addition_->registry->spec();
  RunSpec mine, theirs;
  mine.groups.assign(grown.groups.begin() + std::ssize(spec().groups), grown.groups.end());
  mine.parameters.assign(grown.parameters.begin() + std::ssize(spec().parameters),
                         grown.parameters.end());
  theirs.groups = wanted.groups;
  theirs.parameters = wanted.parameters;
  const std::string difference = FirstDifference(mine, theirs);
  if (difference.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("run \"%s\": add parameters: ranks [%s] and rank %d disagree: %s", name(),
                      absl::StrJoin(addition_->registry->joined_ranks(), ", "), rank, difference));
}

// Sees to it that there is an addition to join. One that nobody waits for any more, of a try that
// was given up, makes room for another: who has joined that one may come otherwise now.
absl::Status Run::StageAddition(std::int64_t rank, const ParameterAddition& wanted) {
  const Registry* base = nullptr;
  {
    MutexLock lock(mutex_);
    if (addition_ != nullptr) {
      const bool stale = adders_.empty() && !addition_->promised;
      const bool answered = addition_->registry->complete() && MatchAddition(rank, wanted).ok();
      if (!stale || answered) return absl::OkStatus();
      addition_ = nullptr;
    }
    base = &registry();
  }
  MUOND_ASSIGN_OR_RETURN(auto made, MakeAddition(*base, wanted));
  MutexLock lock(mutex_);
  if (&registry() == base && addition_ == nullptr) addition_ = std::move(made);
  return absl::OkStatus();
}

// True when the run has them already.
absl::StatusOr<bool> Run::CheckAdded(std::int64_t rank, std::int64_t generation, std::size_t first,
                                     const ParameterAddition& wanted) const {
  MutexLock lock(mutex_);
  if (!stopped_.ok()) return stopped_;
  if (first >= spec().parameters.size()) {
    MUOND_RETURN_IF_ERROR(CheckAdding(rank, generation, first));
    return false;
  }
  const absl::Status added = registry().CheckAdded(rank, first, wanted.parameters, wanted.slices);
  if (!added.ok()) return Refused(name(), added);
  return true;
}

// ABORTED: the rank held other slices in a try before, which is given up now: stage it again.
absl::Status Run::JoinAddition(std::int64_t rank, std::int64_t generation, std::size_t first,
                               const ParameterAddition& wanted, std::uint64_t waiter,
                               const AdditionCallback& done, After& after) {
  MutexLock lock(mutex_);
  // It may have been adopted, or the run have ended, in the meantime.
  MUOND_RETURN_IF_ERROR(CheckAdding(rank, generation, first));
  if (addition_ == nullptr) {
    return absl::UnavailableError(
        absl::StrFormat("run \"%s\": add parameters: it was given up meanwhile", name()));
  }
  absl::Status status = MatchAddition(rank, wanted);
  if (status.ok()) {
    const auto joined = addition_->registry->JoinAdded(registry(), rank, wanted.slices);
    if (!joined.ok()) status = Refused(name(), joined.status());
  }
  if (!status.ok()) {
    // What a coordinator counts on stays as all ranks wanted it.
    if (addition_->promised) return status;
    if (!absl::IsAlreadyExists(status)) {
      DropAddition(status, after);
      return status;
    }
    DropAddition(
        absl::UnavailableError(absl::StrFormat(
            "run \"%s\": add parameters: rank %d has begun anew: ask again", name(), rank)),
        after);
    return absl::AbortedError(status.message());
  }
  adders_[waiter] = {rank, done};
  if (!addition_->registry->complete()) return absl::OkStatus();
  for (auto& [other, call] : std::exchange(adders_, {})) {
    after.push_back([call = std::move(call.second), name = addition_->name] {
      call(AdditionAnswer{name, false});
    });
  }
  return absl::OkStatus();
}

std::uint64_t Run::AddParameters(std::int64_t rank, std::int64_t generation, std::size_t first,
                                 const ParameterAddition& wanted, AdditionCallback done) {
  After after;
  std::uint64_t waiter = 0;
  {
    MutexLock lock(mutex_);
    waiter = next_waiter_++;
  }
  const auto added = CheckAdded(rank, generation, first, wanted);
  absl::Status status = added.status();
  if (status.ok() && *added) {
    MutexLock lock(mutex_);
    after.push_back([done, name = adopted_] { done(AdditionAnswer{name, true}); });
  } else if (status.ok()) {
    for (int tries = 0; tries < 2; ++tries) {
      status = StageAddition(rank, wanted);
      if (!status.ok()) break;
      status = JoinAddition(rank, generation, first, wanted, waiter, done, after);
      if (!absl::IsAborted(status)) break;
    }
  }
  if (!status.ok()) after.push_back([done, status] { done(status); });
  CallAll(after);
  return waiter;
}

// The lock is held.
void Run::DropAddition(const absl::Status& why, After& after) {
  for (auto& [waiter, call] : std::exchange(adders_, {})) {
    after.push_back([call = std::move(call.second), why] { call(why); });
  }
  addition_ = nullptr;
}

void Run::AdditionDeadline(std::uint64_t waiter) {
  AdditionCallback done;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    const auto found = adders_.find(waiter);
    if (found == adders_.end()) return;
    done = std::move(found->second.second);
    status = absl::DeadlineExceededError(absl::StrFormat(
        "run \"%s\": add parameters: deadline passed; missing: ranks [%s], which have not asked "
        "for them",
        name(), absl::StrJoin(addition_->registry->missing_ranks(), ", ")));
    adders_.erase(found);
  }
  done(status);
}

// Its call was cancelled: nobody waits, and what the rank asked for binds nobody.
void Run::AdditionGone(std::uint64_t waiter) {
  After after;
  {
    MutexLock lock(mutex_);
    const auto found = adders_.find(waiter);
    if (found == adders_.end()) return;
    const std::int64_t rank = found->second.first;
    adders_.erase(found);
    DropAddition(absl::UnavailableError(absl::StrFormat(
                     "run \"%s\": add parameters: rank %d has gone: ask again", name(), rank)),
                 after);
  }
  CallAll(after);
}

// ---- The step border --------------------------------------------------------------------------

// The lock is held. OK iff the named parameters are the run's, or can become so.
absl::Status Run::CheckAdopt(const std::string& wanted) const {
  if (!Grows(wanted)) return absl::OkStatus();
  const bool here = addition_ != nullptr && addition_->registry->complete();
  if (here && addition_->name == wanted) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": add parameters: %s", name(),
                      here ? "the trainers have told this daemon of others than another"
                           : "this daemon has not been told of them by all ranks"));
}

// The lock is held, and no step is in flight. State that is here stays; the new has its own, which
// waits for initial values, and its own t.
void Run::Adopt() {
  adopt_after_commit_ = false;
  const auto addition = std::move(addition_);
  const int known = static_cast<int>(spec().parameters.size());
  CountMemory(-1);
  DropBuddyCopies();
  registries_.Replace(std::move(addition->registry));
  engines_->Add(std::move(addition->engines), spec());
  CountMemory(1);
  staging_.set_bytes_max(StagingMax(registry(), context_.limits));
  adopted_ = addition->name;
  PublishParameters();
  // Made for the state as it was.
  staged_.reset();
  spare_copies_ = nullptr;
  image_.reset();
  image_changed_.notify_all();
  const bool stepped = machine_->version() > start_.next_step;
  if (restored_ || stepped) values_from_ = known;
  restored_ = false;
  start_.next_step = machine_->version();
  StepLayout layout = LayoutHere();
  initial_.Expect(layout, values_from_);
  machine_->OnLayout(std::move(layout), spec());
  // What the buddy has lacks the added parameters: a snapshot goes there before the next step.
  ForgetBuddy();
  if (buddy_ != nullptr) StartBuddy();
  running_ = false;
  StartIfReady();
  metrics_->SetState(StateLocked());
  spdlog::info(
      "run \"{}\": {} parameters were added at step {} of generation {}: {} on Muon, {} on "
      "AdamW in all; plan {}",
      name(), spec().parameters.size() - known, machine_->next_step(), machine_->generation(),
      routing().muon_parameters, routing().adamw_parameters, plan().hash);
}

}  // namespace muond
