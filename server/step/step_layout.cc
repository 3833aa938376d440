#include "server/step/step_layout.h"

#include <algorithm>
#include <utility>

#include "proto/check.h"

namespace muond {

LayoutIndex::LayoutIndex(StepLayout layout) : layout_(std::move(layout)) {
  MUOND_CHECK(layout_.world_size >= 1, "a run has ranks");
  MUOND_CHECK(layout_.self >= 0 && layout_.self < daemons(), "a daemon is one of its run's");
  names_.resize(layout_.parameters.size());
  for (int p = 0; p < parameters(); ++p) {
    const StepLayout::Parameter& parameter = layout_.parameters[p];
    MUOND_CHECK(by_name_.emplace(parameter.name, p).second, "names are unique");
    MUOND_CHECK(parameter.state >= 0 && parameter.state <= p, "the first of a tie holds the state");
    const StepLayout::Parameter& state = layout_.parameters[parameter.state];
    MUOND_CHECK(state.state == parameter.state, "a state holds itself");
    MUOND_CHECK(state.replicated == parameter.replicated, "a tie is replicated as a whole");
    MUOND_CHECK(parameter.slices_of_rank.empty() ||
                    static_cast<std::int64_t>(parameter.slices_of_rank.size()) == world_size(),
                "slices are counted for every rank or none");
    std::int64_t total = 0;
    std::int64_t holders = 0;
    for (std::int64_t rank = 0; rank < std::ssize(parameter.slices_of_rank); ++rank) {
      const std::int64_t count = parameter.slices_of_rank[rank];
      MUOND_CHECK(count >= 0, "a count of slices is not negative");
      total += Slices(p, rank);
      holders += count > 0 ? 1 : 0;
    }
    totals_.push_back(total);
    holders_.push_back(holders);
    names_[parameter.state].push_back(p);
    slices_ += total;
  }
}

int LayoutIndex::Find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? -1 : found->second;
}

std::int64_t LayoutIndex::Registered(int p, std::int64_t rank) const {
  const auto& slices = layout_.parameters[p].slices_of_rank;
  return slices.empty() ? 0 : slices[rank];
}

std::int64_t LayoutIndex::Slices(int p, std::int64_t rank) const {
  const StepLayout::Parameter& parameter = layout_.parameters[p];
  if (parameter.here == StepLayout::Here::kAll) return Registered(p, rank);
  const auto found = parameter.slices_here.find(rank);
  return found == parameter.slices_here.end() ? 0 : std::ssize(found->second);
}

std::int64_t LayoutIndex::Number(int p, std::int64_t rank, std::int64_t k) const {
  const StepLayout::Parameter& parameter = layout_.parameters[p];
  return parameter.here == StepLayout::Here::kAll ? k : parameter.slices_here.at(rank)[k];
}

bool LayoutIndex::IsHere(int p, std::int64_t rank, std::int64_t slice) const {
  const StepLayout::Parameter& parameter = layout_.parameters[p];
  if (parameter.here == StepLayout::Here::kAll) return slice >= 0 && slice < Registered(p, rank);
  const auto found = parameter.slices_here.find(rank);
  return found != parameter.slices_here.end() &&
         std::binary_search(found->second.begin(), found->second.end(), slice);
}

}  // namespace muond
