// Parameters that are added to a run.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/registry/registry.h"
#include "server/registry/spec_diff.h"

namespace muond {

absl::StatusOr<Registry> Registry::WithAdded(const std::vector<GroupSpec>& groups,
                                             const std::vector<ParameterSpec>& parameters,
                                             const RegistryLimits& limits,
                                             const Placement& placement) const {
  if (parameters.empty()) {
    return absl::InvalidArgumentError("add parameters: there is none");
  }
  MUOND_ASSIGN_OR_RETURN(Registry registry,
                         Create(Extended(spec_, groups, parameters), limits, placement));
  MUOND_RETURN_IF_ERROR(registry.CheckAddition(spec_.parameters.size()));
  // The plan's rule, on which everything else relies: state stays where it is.
  const auto& before = plan_.shards;
  const auto& after = registry.plan_.shards;
  if (after.size() < before.size() || !std::equal(before.begin(), before.end(), after.begin())) {
    return absl::InternalError("add parameters: the plan would move what is there");
  }
  return registry;
}

// What RouteParameters does not see, as it looks at the run as a whole.
absl::Status Registry::CheckAddition(std::size_t first) const {
  std::set<std::string> ties;
  for (std::size_t i = 0; i < first; ++i) ties.insert(spec_.parameters[i].tie);
  std::vector<std::string> flat;
  bool muon = false;
  for (std::size_t i = first; i < spec_.parameters.size(); ++i) {
    const ParameterSpec& spec = spec_.parameters[i];
    if (!spec.tie.empty() && ties.count(spec.tie) > 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": tie \"%s\": an added parameter can't share the state of one that "
          "was there before",
          spec.name, spec.tie));
    }
    muon = muon || routing_.parameters[i].algorithm == Algorithm::kMuon;
    const auto group = std::find_if(spec_.groups.begin(), spec_.groups.end(),
                                    [&](const GroupSpec& g) { return g.name == spec.group; });
    if (group->algorithm == Algorithm::kAuto && spec.role == Role::kHidden && !spec.exclude &&
        spec.shape->size() < 2) {
      flat.push_back(spec.name);
    }
  }
  if (flat.empty() || muon) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "parameters \"%s\": role hidden, but no matrix is among the added parameters: Muon would be "
      "silently inactive; send the layers' logical shapes, not those of flattened shards",
      absl::StrJoin(flat, "\", \"")));
}

absl::StatusOr<Registry::JoinResult> Registry::JoinAdded(const Registry& before, std::int64_t rank,
                                                         const RankSlices& added) {
  const auto held = before.ranks_.find(rank);
  if (held == before.ranks_.end()) {
    return absl::NotFoundError(absl::StrFormat("rank %d: has not registered", rank));
  }
  RankSlices slices = added;
  for (const auto& [name, boxes] : added) {
    if (before.Find(name) < 0) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": rank %d: was there before: what a rank holds of it stays as it is", name,
        rank));
  }
  for (const auto& [parameter, boxes] : held->second.slices) {
    slices.emplace(before.spec_.parameters[parameter].name, boxes);
  }
  return Join(rank, held->second.session, slices);
}

absl::Status Registry::CheckAdded(std::int64_t rank, std::size_t first,
                                  const std::vector<ParameterSpec>& parameters,
                                  const RankSlices& slices) const {
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrFormat("add parameters behind the first %d of rank %d: %s", first, rank, why));
  };
  const auto& borders = spec_.additions;
  const auto border = std::find(borders.begin(), borders.end(), static_cast<std::int64_t>(first));
  if (border == borders.end()) {
    return refuse(
        absl::StrFormat("the run has %d, and no addition began there", spec_.parameters.size()));
  }
  const std::size_t end =
      border + 1 == borders.end() ? spec_.parameters.size() : static_cast<std::size_t>(border[1]);
  RunSpec mine, theirs;
  mine.parameters.assign(spec_.parameters.begin() + first, spec_.parameters.begin() + end);
  theirs.parameters = parameters;
  const std::string difference = FirstDifference(mine, theirs);
  if (!difference.empty()) return refuse("others were added there: " + difference);
  MUOND_ASSIGN_OR_RETURN(const SlicesByIndex boxes, CheckSlices(rank, slices));
  for (std::size_t p = first; p < end; ++p) {
    const int parameter = static_cast<int>(p);
    const auto named = boxes.find(parameter);
    const std::vector<Box> sent = named == boxes.end() ? std::vector<Box>{} : named->second;
    if (sent != SlicesOf(parameter, rank)) {
      return refuse(absl::StrFormat("parameter \"%s\": it was added with other slices",
                                    spec_.parameters[p].name));
    }
  }
  return absl::OkStatus();
}

}  // namespace muond
