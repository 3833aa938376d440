#include "client/cpp/owner_table.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::client {
namespace {

absl::Status Unusable(const RunSpec& spec, const std::string& why) {
  return absl::InternalError(
      absl::StrFormat("run \"%s\": register: the daemon's plan is unusable: %s", spec.name, why));
}

absl::Status CheckCover(const RunSpec& spec, int parameter, const std::vector<Shard>& shards) {
  MUOND_ASSIGN_OR_RETURN(const std::int64_t elements,
                         ElementCount(*spec.parameters[parameter].shape));
  std::int64_t next = 0;
  for (const Shard& shard : shards) {
    if (shard.first != next || shard.elements < 0) {
      return Unusable(spec, absl::StrFormat("parameter \"%s\": expected a shard from element %d, "
                                            "got one from %d",
                                            spec.parameters[parameter].name, next, shard.first));
    }
    next += shard.elements;
  }
  if (next == elements) return absl::OkStatus();
  return Unusable(spec, absl::StrFormat("parameter \"%s\": its shards end at element %d of %d",
                                        spec.parameters[parameter].name, next, elements));
}

}  // namespace

absl::StatusOr<OwnerTable> OwnerTable::Make(const RunSpec& spec,
                                            const v1::RegisterReply& registered) {
  OwnerTable table;
  table.daemons_ = std::max(registered.daemons_size(), 1);
  std::unordered_map<std::string, int> index;
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    index[spec.parameters[i].name] = static_cast<int>(i);
    table.parameters_[spec.parameters[i].name].shape = *spec.parameters[i].shape;
  }
  if (table.daemons_ == 1) return table;

  std::vector<std::vector<Shard>> shards(spec.parameters.size());
  for (const v1::Shard& shard : registered.shards()) {
    if (shard.parameter() < 0 || shard.parameter() >= std::ssize(shards) || shard.daemon() < 0 ||
        shard.daemon() >= table.daemons_) {
      return Unusable(spec, absl::StrFormat("no parameter %d or no daemon %d", shard.parameter(),
                                            shard.daemon()));
    }
    const int parameter = static_cast<int>(shard.parameter());
    shards[parameter].push_back(
        {parameter, shard.first(), shard.elements(), static_cast<int>(shard.daemon())});
  }
  // Names that share a state are cut as the one that holds it.
  for (const v1::RoutedParameter& routed : registered.routing().parameters()) {
    const auto name = index.find(routed.name());
    const auto holder = index.find(routed.tied_to().empty() ? routed.name() : routed.tied_to());
    if (name == index.end() || holder == index.end()) {
      return Unusable(spec, absl::StrFormat("no parameter \"%s\"", routed.name()));
    }
    MUOND_RETURN_IF_ERROR(CheckCover(spec, holder->second, shards[holder->second]));
    std::vector<std::vector<Shard>>& by_daemon = table.parameters_.at(routed.name()).shards;
    by_daemon.resize(table.daemons_);
    for (const Shard& shard : shards[holder->second]) by_daemon[shard.owner].push_back(shard);
  }
  return table;
}

std::vector<ElementRange> OwnerTable::Owned(int daemon, const std::string& parameter,
                                            const Box& box) const {
  const std::int64_t elements = box.Elements();
  if (daemons_ == 1) {
    return elements > 0 ? std::vector<ElementRange>{{0, elements}} : std::vector<ElementRange>{};
  }
  const Parameter& owned = parameters_.at(parameter);
  return RangesInShards(box, owned.shape, owned.shards[daemon]);
}

}  // namespace muond::client
