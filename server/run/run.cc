// Joining, initial values, leaving.
#include "server/run/run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/run/run_create.h"

namespace muond {

absl::StatusOr<Run::JoinReply> Run::Join(const RunSpec& spec, std::int64_t rank,
                                         const std::string& session, const RankSlices& slices) {
  MutexLock lock(mutex_);
  if (!stopped_.ok()) return stopped_;
  if (absl::Status same = registry().CheckSameSpec(spec); !same.ok()) return Refused(name(), same);
  auto joined = mutable_registry().Join(rank, session, slices, spec.parameters.size());
  if (!joined.ok()) return Refused(name(), joined.status());
  left_.erase(rank);
  metrics_->SetTrainersConnected(static_cast<std::int64_t>(registry().joined_ranks().size()));
  if (machine_ == nullptr && registry().complete()) {
    MakeMachine();
    StartIfReady();
  }
  return JoinReply{joined->rejoined, joined->missing_ranks};
}

absl::Status Run::CheckOpen(std::int64_t generation) const {
  if (!stopped_.ok()) return stopped_;
  const std::int64_t now = GenerationLocked();
  if (generation == now) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": generation %d is not the current one, %d: register again",
                      name(), generation, now));
}

absl::Status Run::CheckJoined(std::int64_t rank) const {
  const auto joined = registry().joined_ranks();
  if (std::find(joined.begin(), joined.end(), rank) != joined.end()) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrFormat("run \"%s\": rank %d has not registered", name(), rank));
}

absl::StatusOr<SliceId> Run::Resolve(const SliceAddress& address) const {
  const int parameter = registry().Find(address.parameter);
  if (parameter < 0) {
    return absl::NotFoundError(absl::StrFormat("run \"%s\": parameter \"%s\" is not registered",
                                               name(), address.parameter));
  }
  MUOND_RETURN_IF_ERROR(CheckJoined(address.rank));
  const auto count = registry().SlicesOf(parameter, address.rank).size();
  if (address.slice < 0 || address.slice >= static_cast<std::int64_t>(count)) {
    const int holder = routing().parameters[parameter].state;
    if (holder != parameter && count == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter \"%s\": is the same tensor as \"%s\": send that one",
                          address.parameter, spec().parameters[holder].name));
    }
    return absl::NotFoundError(
        absl::StrFormat("parameter \"%s\": rank %d registered %d slices, there is no slice %d",
                        address.parameter, address.rank, count, address.slice));
  }
  return SliceId{parameter, address.rank, address.slice, address.micro_batch};
}

std::string Run::SliceObject(const SliceId& id, const std::string& action) const {
  return absl::StrFormat("parameter \"%s\": %s of slice %d from rank %d",
                         spec().parameters[id.parameter].name, action, id.slice, id.rank);
}

absl::Status Run::CheckInitial(std::int64_t generation, int parameter) const {
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  if (!lost_.empty()) return NeedsRestore();
  if (restored_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run \"%s\": initial values are refused: the run was restored from a checkpoint, pull "
        "version %d",
        name(), machine_ == nullptr ? start_.next_step : machine_->version()));
  }
  if (parameter < values_from_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("run \"%s\": initial values of \"%s\" are refused: it was there before "
                        "parameters were added, pull version %d",
                        name(), spec().parameters[parameter].name, start_.next_step));
  }
  if (machine_ == nullptr || machine_->version() == start_.next_step) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("run \"%s\": initial values are refused once a step was consumed (%d were)",
                      name(), machine_->version()));
}

absl::StatusOr<OpenSlice> Run::OpenInitial(const SliceAddress& address, std::int64_t generation,
                                           Dtype dtype) {
  MutexLock lock(mutex_);
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  MUOND_ASSIGN_OR_RETURN(const SliceId id, Resolve(address));
  MUOND_RETURN_IF_ERROR(CheckInitial(generation, id.parameter));
  const int holder = routing().parameters[id.parameter].state;
  if (holder != id.parameter) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": shares its state with \"%s\": send that one's values",
                        address.parameter, spec().parameters[holder].name));
  }
  const Box& box = registry().SlicesOf(id.parameter, id.rank)[id.slice];
  OpenSlice slice{.id = id, .generation = generation, .step = -1};
  // The values arrive in the order of the box and are spread over the tensor by the engines. What
  // lies in shards that are here is kept.
  SliceTarget target{.shape = {box.Elements()}};
  std::int64_t elements = 0;
  for (const Shard& shard : registry().ShardsHere(id.parameter)) {
    const ElementRange range = RangeInShard(box, *spec().parameters[id.parameter].shape, shard);
    if (range.count > 0) target.shards.push_back({.first = range.first, .elements = range.count});
    elements += range.count;
  }
  if (elements == 0 && box.Elements() > 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: has no element in what this daemon owns of it", SliceObject(id, "initial values")));
  }
  MUOND_ASSIGN_OR_RETURN(slice.memory, engines_->AllocateStaging(id.parameter, elements, dtype));
  target.keepalive = slice.memory;
  target.base = static_cast<std::byte*>(slice.memory->data());
  slice.receiver =
      std::make_shared<SliceReceiver>(SliceObject(id, "initial values"),
                                      Box{{0}, {box.Elements()}, true}, dtype, std::move(target));
  initial_slices_.Open(id, slice.receiver);
  return slice;
}

void Run::CloseInitial(const OpenSlice& slice, ArrivalCallback done) {
  absl::Status status = slice.receiver->CheckComplete();
  bool duplicate = false;
  {
    MutexLock lock(mutex_);
    initial_slices_.Drop(slice.id, slice.receiver.get());
    if (status.ok()) status = CheckInitial(slice.generation, slice.id.parameter);
    const auto writing = writing_.find(slice.id);
    if (status.ok() && writing != writing_.end()) {
      // Another stream's copy of the slice is on its way in: then it is known what this one is.
      auto self = shared_from_this();
      writing->second.push_back([self, slice, done] { self->CloseInitial(slice, done); });
      return;
    }
    if (status.ok()) {
      const auto arrival = initial_.Check(slice.id, spec().parameters[slice.id.parameter].name,
                                          slice.receiver->digest());
      status = arrival.status();
      duplicate = status.ok() && *arrival == InitialValues::Arrival::kDuplicate;
    }
    if (duplicate) metrics_->OnDuplicateRequest();
    if (status.ok() && !duplicate) {
      writing_[slice.id];
      const Box& box = registry().SlicesOf(slice.id.parameter, slice.id.rank)[slice.id.slice];
      auto self = shared_from_this();
      engines_->WriteInitial(slice.id.parameter, box, slice.memory, slice.receiver->dtype(),
                             [self, slice, life = life_, done](const absl::Status& written) {
                               self->FinishWriteInitial(slice, life, written, done);
                             });
      return;
    }
  }
  if (status.ok()) return done(SliceArrival::kDuplicate);
  done(status);
}

// On an executor's thread.
void Run::FinishWriteInitial(const OpenSlice& slice, std::int64_t life, absl::Status status,
                             const ArrivalCallback& done) {
  std::vector<std::function<void()>> waiting;
  {
    MutexLock lock(mutex_);
    waiting = std::move(writing_[slice.id]);
    writing_.erase(slice.id);
    if (status.ok() && life != life_) {
      status = absl::AbortedError(absl::StrFormat("%s: the run is initialized anew",
                                                  SliceObject(slice.id, "initial values")));
    }
    if (status.ok()) {
      initial_.Written(slice.id, slice.receiver->digest());
      StartIfReady();
    }
  }
  done(status.ok() ? absl::StatusOr<SliceArrival>(SliceArrival::kAccepted) : status);
  for (const auto& call : waiting) call();
}

// The lock is held. Posts the last piece of work of the opening, once everything is there.
void Run::StartIfReady() {
  if (running_ || machine_ == nullptr || !(restored_ || initial_.complete())) return;
  running_ = true;
  metrics_->SetState(StateLocked());
  if (restored_) return;
  auto self = shared_from_this();
  engines_->FinishInitial([self, life = life_](const absl::StatusOr<StateHealth>& health) {
    if (!health.ok()) return self->FailEngine(life, std::string(health.status().message()));
    MutexLock lock(self->mutex_);
    if (life == self->life_) self->PublishHealth({}, *health);
  });
  // Without waiting for the first step: parameters may have been added to old state.
  if (buddy_ != nullptr) SnapshotForBuddy();
}

Run::InitialProgress Run::initial_progress() const {
  MutexLock lock(mutex_);
  return {initial_.complete(), initial_.MissingNames(8)};
}

absl::StatusOr<bool> Run::Leave(std::int64_t rank, std::int64_t generation,
                                std::vector<std::int64_t>& open_ranks) {
  MutexLock lock(mutex_);
  MUOND_RETURN_IF_ERROR(CheckOpen(generation));
  MUOND_RETURN_IF_ERROR(CheckJoined(rank));
  left_.insert(rank);
  for (std::int64_t other : registry().joined_ranks()) {
    if (left_.count(other) == 0) open_ranks.push_back(other);
  }
  metrics_->SetTrainersConnected(static_cast<std::int64_t>(open_ranks.size()));
  return open_ranks.empty();
}

void Run::Stop(const absl::Status& status) {
  After after;
  {
    MutexLock lock(mutex_);
    if (!stopped_.ok()) return;
    stopped_ = status;
    initial_slices_.Clear(stopped_);
    Effects effects;
    if (machine_ != nullptr) machine_->OnStop(status, effects);
    Carry(effects, after);
    // What a coordinator has been promised stays; nobody waits for it any more.
    for (auto& [waiter, call] : std::exchange(adders_, {})) {
      after.push_back([call = std::move(call.second), status] { call(status); });
    }
    metrics_->SetState(StateLocked());
  }
  CallAll(after);
}

}  // namespace muond
