#include "server/registry/registry.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "server/registry/cover.h"
#include "server/registry/spec_diff.h"

namespace muond {
namespace {

constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();

std::int64_t SaturatingAdd(std::int64_t a, std::int64_t b) {
  return __builtin_add_overflow(a, b, &a) ? kInt64Max : a;
}

std::int64_t SaturatingMultiply(std::int64_t a, std::int64_t b) {
  return __builtin_mul_overflow(a, b, &a) ? kInt64Max : a;
}

absl::Status LimitExceeded(const std::string& object, const char* unit, std::int64_t has,
                           std::int64_t limit, const char* flag) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: has %d %s, the daemon's limit is %d: raise %s", object, has, unit, limit, flag));
}

// Limits that routing need not be done for; it must not be, as it lists every matrix of a tensor.
absl::Status CheckCounts(const RunSpec& spec, const RegistryLimits& limits) {
  const std::string run = absl::StrFormat("run \"%s\"", spec.name);
  if (spec.world_size > limits.world_size_max) {
    return LimitExceeded(run, "trainer ranks", spec.world_size, limits.world_size_max,
                         "--max-world-size");
  }
  const auto parameters = static_cast<std::int64_t>(spec.parameters.size());
  if (parameters > limits.parameters_max) {
    return LimitExceeded(run, "parameters", parameters, limits.parameters_max, "--max-parameters");
  }
  for (const ParameterSpec& parameter : spec.parameters) {
    // A shape that is missing or out of range is for routing to refuse.
    const auto elements = parameter.shape.has_value() ? ElementCount(*parameter.shape)
                                                      : absl::StatusOr<std::int64_t>(0);
    const std::int64_t bytes = 4 * elements.value_or(0);
    if (bytes > limits.tensor_bytes_max) {
      return LimitExceeded(absl::StrFormat("parameter \"%s\" of shape %s", parameter.name,
                                           DimsToString(*parameter.shape)),
                           "bytes in fp32", bytes, limits.tensor_bytes_max, "--max-tensor-bytes");
    }
  }
  return absl::OkStatus();
}

std::int64_t Elements(const std::vector<Box>& boxes) {
  std::int64_t elements = 0;
  for (const Box& box : boxes) elements = SaturatingAdd(elements, box.Elements());
  return elements;
}

// False only when the boxes have no element in common. Exact for two flat ranges and for two
// others, which is all that most runs have.
bool MayOverlap(const Box& a, const Box& b) {
  if (a.flat != b.flat) return true;
  for (std::size_t d = 0; d < a.size.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.size[d] || b.offset[d] >= a.offset[d] + a.size[d]) {
      return false;
    }
  }
  return true;
}

std::string RankObject(const std::string& parameter, std::int64_t rank) {
  return absl::StrFormat("parameter \"%s\": rank %d", parameter, rank);
}

// What is held of the first `end` parameters.
std::map<int, std::vector<Box>> Below(const std::map<int, std::vector<Box>>& slices,
                                      std::size_t end) {
  std::map<int, std::vector<Box>> below;
  for (const auto& [parameter, boxes] : slices) {
    if (static_cast<std::size_t>(parameter) < end) below.emplace(parameter, boxes);
  }
  return below;
}

}  // namespace

absl::StatusOr<Registry> Registry::Create(RunSpec spec, const RegistryLimits& limits,
                                          const Placement& placement) {
  if (spec.parameters.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("run \"%s\": has no parameters", spec.name));
  }
  if (spec.world_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("run \"%s\": world_size: expected at least 1 trainer rank, got %d",
                        spec.name, spec.world_size));
  }
  MUOND_RETURN_IF_ERROR(CheckCounts(spec, limits));
  Registry registry;
  MUOND_ASSIGN_OR_RETURN(registry.routing_, RouteParameters(spec));
  MUOND_ASSIGN_OR_RETURN(registry.plan_, MakePlan(spec, registry.routing_, placement.plan));
  registry.KeepShards(placement);
  registry.spec_ = std::move(spec);
  registry.CountBytes();
  const std::int64_t bytes = registry.run_bytes_;
  if (limits.run_bytes_max > 0 && bytes > limits.run_bytes_max) {
    return LimitExceeded(absl::StrFormat("run \"%s\"", registry.spec_.name),
                         "bytes of optimizer state and staged gradients", bytes,
                         limits.run_bytes_max, "--max-run-bytes");
  }
  registry.slices_per_rank_max_ = limits.slices_per_rank_max;
  for (std::size_t i = 0; i < registry.spec_.parameters.size(); ++i) {
    registry.index_.emplace(registry.spec_.parameters[i].name, static_cast<int>(i));
  }
  registry.held_.resize(registry.spec_.parameters.size());
  registry.held_elements_.resize(registry.spec_.parameters.size(), 0);
  return registry;
}

void Registry::KeepShards(const Placement& placement) {
  here_.resize(routing_.parameters.size());
  for (const Shard& shard : plan_.shards) {
    const PlanOwner& owner = plan_.owners[shard.owner].place;
    if (owner.daemon != placement.daemon) continue;
    here_[shard.parameter].push_back(shard);
    here_[shard.parameter].back().owner = owner.device;
  }
}

std::int64_t Registry::ElementsHere(int parameter) const {
  std::int64_t elements = 0;
  for (const Shard& shard : ShardsHere(parameter)) elements += shard.elements;
  return elements;
}

// Master weights and moments, each tie once, and one staged gradient of every name.
void Registry::CountBytes() {
  std::map<std::string, const GroupSpec*> groups;
  for (const GroupSpec& group : spec_.groups) groups[group.name] = &group;
  std::int64_t gradients = 0;
  for (int i = 0; i < static_cast<int>(spec_.parameters.size()); ++i) {
    const RoutedParameter& routed = routing_.parameters[i];
    const std::int64_t elements = ElementsHere(i);
    const auto per_element = static_cast<std::int64_t>(DtypeBytes(spec_.parameters[i].dtype));
    gradients = SaturatingAdd(gradients, SaturatingMultiply(elements, per_element));
    if (routed.state != i) continue;
    const std::int64_t state =
        StateBytesPerElement(routed.algorithm, *groups.at(spec_.parameters[i].group));
    state_bytes_ = SaturatingAdd(state_bytes_, SaturatingMultiply(elements, state));
  }
  run_bytes_ = SaturatingAdd(state_bytes_, gradients);
}

int Registry::Find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? -1 : found->second;
}

absl::StatusOr<Registry::JoinResult> Registry::Join(std::int64_t rank, const std::string& session,
                                                    const RankSlices& slices, std::size_t known) {
  if (rank < 0 || rank >= spec_.world_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %d: is not one of the run's trainer ranks 0..%d", rank, spec_.world_size - 1));
  }
  MUOND_ASSIGN_OR_RETURN(SlicesByIndex mine, CheckSlices(rank, slices));
  if (const auto held = ranks_.find(rank); held != ranks_.end()) {
    if (held->second.session != session) {
      return absl::AlreadyExistsError(absl::StrFormat(
          "rank %d: is held by another session: two trainers with one rank, or a restarted one "
          "that has to name its former session",
          rank));
    }
    if (Below(held->second.slices, known) != mine) {
      return absl::AlreadyExistsError(absl::StrFormat(
          "rank %d: joined before with other slices: the same session must bring the same ones",
          rank));
    }
    return JoinResult{true, missing_ranks()};
  }
  if (known < spec_.parameters.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rank %d: joins with %d of the run's %d parameters: only a rank that was there before the "
        "others were added may",
        rank, known, spec_.parameters.size()));
  }
  for (const auto& [parameter, boxes] : mine) {
    MUOND_RETURN_IF_ERROR(CheckAgainstOthers(parameter, rank, boxes));
  }
  const bool last = static_cast<std::int64_t>(ranks_.size()) + 1 == spec_.world_size;
  if (last) MUOND_RETURN_IF_ERROR(CheckComplete(rank, mine));
  // Nothing fails from here on.
  for (const auto& [parameter, boxes] : mine) {
    for (const Box& box : boxes) held_[parameter].push_back({box, rank});
    held_elements_[parameter] = SaturatingAdd(held_elements_[parameter], Elements(boxes));
  }
  ranks_.emplace(rank, Rank{session, std::move(mine)});
  return JoinResult{false, missing_ranks()};
}

// Everything about a rank's slices that needs no look at other ranks.
absl::StatusOr<Registry::SlicesByIndex> Registry::CheckSlices(std::int64_t rank,
                                                              const RankSlices& slices) const {
  std::int64_t count = 0;
  for (const auto& [name, boxes] : slices) count += static_cast<std::int64_t>(boxes.size());
  if (count > slices_per_rank_max_) {
    return LimitExceeded(absl::StrFormat("rank %d", rank), "slices", count, slices_per_rank_max_,
                         "--max-slices-per-rank");
  }
  SlicesByIndex mine;
  for (const auto& [name, boxes] : slices) {
    const int parameter = Find(name);
    if (parameter < 0) {
      return absl::NotFoundError(absl::StrFormat(
          "parameter \"%s\": rank %d has slices of it, but it is not one of the run's parameters",
          name, rank));
    }
    MUOND_RETURN_IF_ERROR(CheckBoxes(parameter, rank, boxes));
    // A tensor without elements has nothing to push: its slices would only be waited for.
    if (!boxes.empty() && routing_.parameters[parameter].elements > 0) {
      mine.emplace(parameter, boxes);
    }
  }
  return mine;
}

absl::Status Registry::CheckBoxes(int parameter, std::int64_t rank,
                                  const std::vector<Box>& boxes) const {
  const ParameterSpec& spec = spec_.parameters[parameter];
  const RoutedParameter& routed = routing_.parameters[parameter];
  if (spec.tie_reduction == TieReduction::kSame && routed.state != parameter && !boxes.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: has slices of a name tied as the same tensor: push \"%s\" only",
                        RankObject(spec.name, rank), spec_.parameters[routed.state].name));
  }
  std::vector<OwnedBox> owned;
  owned.reserve(boxes.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const absl::Status status = ValidateBox(boxes[i], *spec.shape);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s, slice %d: %s (%d elements): if the shape is a partitioned placeholder's, send the "
          "layer's (ds_shape)",
          RankObject(spec.name, rank), i, status.message(), routed.elements));
    }
    if (boxes[i].Elements() == 0 && routed.elements > 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s, slice %d: box %s has no elements: leave it out",
                          RankObject(spec.name, rank), i, boxes[i].ToString()));
    }
    owned.push_back({boxes[i], rank});
  }
  if (!spec.replicated || boxes.empty()) return CheckNoOverlap(spec.name, *spec.shape, owned);
  absl::Status status = CheckExactCover(spec.name, *spec.shape, owned);
  if (status.ok() || status.code() != absl::StatusCode::kInvalidArgument) return status;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s; it is replicated, so that rank %d must hold all %d elements of shape %s, its slices "
      "have "
      "%d",
      status.message(), rank, routed.elements, DimsToString(*spec.shape), Elements(boxes)));
}

absl::Status Registry::CheckAgainstOthers(int parameter, std::int64_t rank,
                                          const std::vector<Box>& boxes) const {
  const ParameterSpec& spec = spec_.parameters[parameter];
  const std::vector<OwnedBox>& held = held_[parameter];
  if (spec.replicated || held.empty()) return absl::OkStatus();
  // Most ranks bring one box each: looking at all pairs is then far cheaper than the full proof.
  constexpr std::size_t kPairwiseMax = 16;
  const auto apart = [&](const Box& box) {
    return std::none_of(held.begin(), held.end(),
                        [&box](const OwnedBox& other) { return MayOverlap(box, other.box); });
  };
  if (boxes.size() <= kPairwiseMax && std::all_of(boxes.begin(), boxes.end(), apart)) {
    return absl::OkStatus();
  }
  std::vector<OwnedBox> all = held;
  for (const Box& box : boxes) all.push_back({box, rank});
  absl::Status status = CheckNoOverlap(spec.name, *spec.shape, all);
  if (status.ok() || status.code() != absl::StatusCode::kInvalidArgument) return status;
  const std::int64_t total = SaturatingAdd(held_elements_[parameter], Elements(boxes));
  const std::int64_t elements = routing_.parameters[parameter].elements;
  if (total <= elements) return status;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s; the slices of all ranks have %d elements, shape %s has %d: send the layer's shape, and "
      "declare the parameter replicated if each rank holds the whole gradient",
      status.message(), total, DimsToString(*spec.shape), elements));
}

// With the last rank's slices every element of every parameter must be in some rank's.
absl::Status Registry::CheckComplete(std::int64_t rank, const SlicesByIndex& mine) const {
  for (int p = 0; p < static_cast<int>(spec_.parameters.size()); ++p) {
    const ParameterSpec& spec = spec_.parameters[p];
    const RoutedParameter& routed = routing_.parameters[p];
    if (spec.tie_reduction == TieReduction::kSame && routed.state != p) continue;
    const auto boxes = mine.find(p);
    const std::int64_t total =
        SaturatingAdd(held_elements_[p], boxes == mine.end() ? 0 : Elements(boxes->second));
    // Overlaps were refused before and a replica is whole or absent: the sum tells.
    if (total == routed.elements || (spec.replicated && total > 0)) continue;
    std::vector<OwnedBox> all = held_[p];
    if (boxes != mine.end()) {
      for (const Box& box : boxes->second) all.push_back({box, rank});
    }
    absl::Status status = CheckExactCover(spec.name, *spec.shape, all);
    if (status.code() != absl::StatusCode::kInvalidArgument) return status;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s; the slices of all %d ranks have %d elements, shape %s has %d", status.message(),
        spec_.world_size, total, DimsToString(*spec.shape), routed.elements));
  }
  return absl::OkStatus();
}

absl::Status Registry::CheckSameSpec(const RunSpec& other) const {
  if (spec_ == other) return absl::OkStatus();
  RunSpec mine = spec_;
  mine.additions = other.additions;
  const auto& borders = spec_.additions;
  const auto count = static_cast<std::int64_t>(other.parameters.size());
  if (std::find(borders.begin(), borders.end(), count) != borders.end()) {
    mine.parameters.resize(other.parameters.size());
    mine.groups.resize(std::min(mine.groups.size(), other.groups.size()));
  }
  const std::string difference = FirstDifference(mine, other);
  if (difference.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "run \"%s\": is open with another specification: %s", spec_.name, difference));
}

std::vector<std::int64_t> Registry::missing_ranks() const {
  std::vector<std::int64_t> missing;
  for (std::int64_t rank = 0; rank < spec_.world_size && !complete(); ++rank) {
    if (ranks_.count(rank) == 0) missing.push_back(rank);
  }
  return missing;
}

std::vector<std::int64_t> Registry::joined_ranks() const {
  std::vector<std::int64_t> joined;
  for (const auto& [rank, held] : ranks_) joined.push_back(rank);
  return joined;
}

const std::vector<Box>& Registry::SlicesOf(int parameter, std::int64_t rank) const {
  static const std::vector<Box> kNone;
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return kNone;
  const auto boxes = found->second.slices.find(parameter);
  return boxes == found->second.slices.end() ? kNone : boxes->second;
}

}  // namespace muond
