// What a rank may do before it finishes: the checks of a caller's position, Begin and slices.
#include <charconv>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/step/step_machine.h"

namespace muond {
namespace {

// The shortest decimal that reads back as `value`: values that differ look different.
std::string Shortest(double value) {
  char buffer[32];
  const auto end = std::to_chars(std::begin(buffer), std::end(buffer), value).ptr;
  return std::string(buffer, end);
}

struct Difference {
  std::string what, mine, theirs;
};

constexpr std::pair<const char*, double Hyperparameters::*> kFields[] = {
    {"lr", &Hyperparameters::lr},
    {"weight_decay", &Hyperparameters::weight_decay},
    {"momentum", &Hyperparameters::momentum},
    {"beta1", &Hyperparameters::beta1},
    {"beta2", &Hyperparameters::beta2},
    {"eps", &Hyperparameters::eps},
};

using Groups = std::map<std::string, Hyperparameters>;

// Both maps have the same groups.
std::optional<Difference> FirstDifference(const char* algorithm, const Groups& mine,
                                          const Groups& theirs) {
  for (const auto& [group, values] : mine) {
    const Hyperparameters& others = theirs.at(group);
    for (const auto& [name, field] : kFields) {
      if (values.*field == others.*field) continue;
      return Difference{absl::StrFormat("%s %s of group \"%s\"", algorithm, name, group),
                        Shortest(values.*field), Shortest(others.*field)};
    }
  }
  return std::nullopt;
}

std::optional<Difference> FirstDifference(const StepBegin& mine, const StepBegin& theirs) {
  if (mine.loss_scale != theirs.loss_scale) {
    return Difference{"loss_scale", Shortest(mine.loss_scale), Shortest(theirs.loss_scale)};
  }
  if (mine.micro_batches != theirs.micro_batches) {
    return Difference{"micro_batches", std::to_string(mine.micro_batches),
                      std::to_string(theirs.micro_batches)};
  }
  if (auto muon = FirstDifference("muon", mine.muon, theirs.muon)) return muon;
  return FirstDifference("adamw", mine.adamw, theirs.adamw);
}

}  // namespace

std::string StepMachine::Describe(const Call& call) {
  return absl::StrFormat("step %d: %s by rank %d: ", call.step, call.action, call.rank);
}

absl::Status StepMachine::CheckRank(const Call& call) const {
  if (call.rank >= 0 && call.rank < index_->world_size()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrFormat("%sno such rank, the run's world size is %d",
                                             Describe(call), index_->world_size()));
}

absl::Status StepMachine::CheckGeneration(const Call& call) const {
  if (call.generation == generation_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("%sgeneration %d is not the run's: expected step %d of generation %d",
                      Describe(call), call.generation, next_step_, generation_));
}

absl::Status StepMachine::CheckStep(const Call& call) const {
  if (call.step == next_step_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("%sthe step is %s: expected step %d of generation %d", Describe(call),
                      call.step < next_step_ ? "behind" : "ahead", next_step_, generation_));
}

absl::Status StepMachine::CheckOpen(const Call& call) const {
  if (failed()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%sthe run has failed and needs a restore: %s", Describe(call), failure_));
  }
  return stopped_;
}

// Fills in the groups that a Begin leaves at their last values.
absl::StatusOr<StepBegin> StepMachine::Complete(const Call& call, const StepBegin& begin) const {
  if (const absl::Status told = scaler_.CheckTold(begin.loss_scale); !told.ok()) {
    return absl::InvalidArgumentError(Describe(call) + std::string(told.message()));
  }
  if (begin.micro_batches < 1 || begin.micro_batches > kMaxMicroBatches) {
    return absl::InvalidArgumentError(absl::StrFormat("%sexpected 1 to %d micro-batches, got %d",
                                                      Describe(call), kMaxMicroBatches,
                                                      begin.micro_batches));
  }
  StepBegin complete = begin;
  complete.muon = muon_;
  complete.adamw = adamw_;
  for (const auto& [given, whole] :
       {std::pair(&begin.muon, &complete.muon), std::pair(&begin.adamw, &complete.adamw)}) {
    for (const auto& [group, values] : *given) {
      const auto known = whole->find(group);
      if (known == whole->end()) {
        return absl::NotFoundError(
            absl::StrFormat("%sgroup \"%s\": no such group", Describe(call), group));
      }
      MUOND_RETURN_IF_ERROR(ValidateHyperparameters(group, values));
      known->second = values;
    }
  }
  return complete;
}

// OK iff what the rank says agrees with what others, and the rank itself, said before.
absl::Status StepMachine::Disagreement(const Call& call, const StepBegin& begin) const {
  if (attempt_.begin()) {
    if (const auto difference = FirstDifference(*attempt_.begin(), begin)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "step %d: begin: ranks disagree on %s: ranks [%s] sent %s, rank %d sent %s", call.step,
          difference->what, absl::StrJoin(attempt_.begun(), ", "), difference->mine, call.rank,
          difference->theirs));
    }
  } else if (const auto scale = attempt_.NamedScale(); scale && *scale != begin.loss_scale) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "step %d: begin: ranks disagree on loss_scale: a skip named %s, rank %d sent %s", call.step,
        Shortest(*scale), call.rank, Shortest(begin.loss_scale)));
  }
  return absl::OkStatus();
}

absl::Status StepMachine::OnBegin(std::int64_t rank, std::int64_t generation,
                                  const StepBegin& begin, Effects& effects) {
  const Call call{"begin", rank, generation, begin.step};
  MUOND_RETURN_IF_ERROR(CheckRank(call));
  MUOND_RETURN_IF_ERROR(CheckGeneration(call));
  if (IsLast(begin.step)) return absl::OkStatus();
  MUOND_RETURN_IF_ERROR(CheckStep(call));
  MUOND_RETURN_IF_ERROR(CheckOpen(call));
  MUOND_ASSIGN_OR_RETURN(const StepBegin complete, Complete(call, begin));
  if (attempt_.Skipped(rank)) {
    return absl::FailedPreconditionError(
        Describe(call) + "the rank has skipped the step; raise the generation to start it over");
  }
  if (absl::Status disagreement = Disagreement(call, complete); !disagreement.ok()) {
    Reject(rank, disagreement, effects);
    return disagreement;
  }
  rejected_.erase(rank);
  attempt_.Begin(rank, complete);
  return absl::OkStatus();
}

absl::Status StepMachine::CheckSlice(const Call& call, const SliceId& id) const {
  MUOND_RETURN_IF_ERROR(CheckRank(call));
  if (id.parameter < 0 || id.parameter >= index_->parameters()) {
    return absl::NotFoundError(
        absl::StrFormat("%sparameter %d: no such parameter", Describe(call), id.parameter));
  }
  if (index_->IsHere(id.parameter, id.rank, id.slice)) return absl::OkStatus();
  const std::int64_t slices = index_->Registered(id.parameter, id.rank);
  const std::string& name = index_->parameter(id.parameter).name;
  if (id.slice >= 0 && id.slice < slices) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": push for step %d: slice %d of rank %d has no element in "
                        "what this daemon owns of it",
                        name, call.step, id.slice, id.rank));
  }
  return absl::NotFoundError(absl::StrFormat(
      "parameter \"%s\": push for step %d: no slice %d of rank %d, which registered %d", name,
      call.step, id.slice, id.rank, slices));
}

// Whether the rank may contribute this slice to the attempt in flight.
absl::Status StepMachine::CheckContributor(const Call& call, const SliceId& id) const {
  if (const auto found = rejected_.find(id.rank); found != rejected_.end()) return found->second;
  if (attempt_.Skipped(id.rank)) {
    return absl::FailedPreconditionError(Describe(call) + "the rank has skipped the step");
  }
  if (!attempt_.Begun(id.rank)) {
    return absl::FailedPreconditionError(Describe(call) + "the rank has not begun the step");
  }
  const std::string& name = index_->parameter(id.parameter).name;
  if (id.micro_batch < 0 || id.micro_batch >= attempt_.begin()->micro_batches) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": push for step %d: no micro-batch %d, rank %d began with %d", name,
        call.step, id.micro_batch, id.rank, attempt_.begin()->micro_batches));
  }
  if (attempt_.Absent(id.parameter, id.rank)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": push for step %d: rank %d has named it absent", name,
                        call.step, id.rank));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepMachine::Admission> StepMachine::Admit(const SliceId& id,
                                                          std::int64_t generation,
                                                          std::int64_t step) const {
  const Call call{"push", id.rank, generation, step};
  MUOND_RETURN_IF_ERROR(CheckSlice(call, id));
  MUOND_RETURN_IF_ERROR(CheckGeneration(call));
  if (IsLast(step) && last_digests_.contains(id)) return Admission::kVerify;
  MUOND_RETURN_IF_ERROR(CheckStep(call));
  MUOND_RETURN_IF_ERROR(CheckOpen(call));
  MUOND_RETURN_IF_ERROR(CheckContributor(call, id));
  return attempt_.Digest(id) != nullptr ? Admission::kVerify : Admission::kWrite;
}

absl::StatusOr<StepMachine::Arrival> StepMachine::Compare(const SliceId& id, std::int64_t step,
                                                          std::uint64_t there,
                                                          std::uint64_t digest) const {
  if (there == digest) return Arrival::kDuplicate;
  return absl::AlreadyExistsError(absl::StrFormat(
      "parameter \"%s\": push for step %d: slice %d of rank %d in micro-batch %d is there with "
      "digest %016x, got %016x",
      index_->parameter(id.parameter).name, step, id.slice, id.rank, id.micro_batch, there,
      digest));
}

absl::StatusOr<StepMachine::Arrival> StepMachine::OnSlice(const SliceId& id,
                                                          std::int64_t generation,
                                                          std::int64_t step, std::uint64_t digest,
                                                          Effects& effects) {
  const Call call{"push", id.rank, generation, step};
  MUOND_RETURN_IF_ERROR(CheckSlice(call, id));
  absl::Status ended = absl::AbortedError(absl::StrFormat(
      "%sthe step ended before the slice was whole: expected step %d of generation %d",
      Describe(call), next_step_, generation_));
  if (generation != generation_) return ended;
  if (IsLast(step)) {
    const auto found = last_digests_.find(id);
    if (found == last_digests_.end()) return ended;
    return Compare(id, step, found->second, digest);
  }
  if (step != next_step_) return ended;
  MUOND_RETURN_IF_ERROR(CheckOpen(call));
  if (!rejected_.contains(id.rank) && !attempt_.Begun(id.rank) && !attempt_.Skipped(id.rank)) {
    return ended;
  }
  MUOND_RETURN_IF_ERROR(CheckContributor(call, id));
  if (const std::uint64_t* there = attempt_.Digest(id)) return Compare(id, step, *there, digest);
  attempt_.Accept(id, digest);
  const int state = index_->parameter(id.parameter).state;
  if (attempt_.Arrived(state)) RequestReduction(state, effects);
  Advance(effects);
  return Arrival::kAccepted;
}

}  // namespace muond
