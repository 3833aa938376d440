#include "server/run/initial_values.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace muond {

absl::StatusOr<InitialValues::Arrival> InitialValues::Check(const SliceId& id,
                                                            const std::string& parameter,
                                                            std::uint64_t digest) const {
  const auto found = digests_.find(id);
  if (found == digests_.end()) return Arrival::kNew;
  if (found->second == digest) return Arrival::kDuplicate;
  return absl::AlreadyExistsError(absl::StrFormat(
      "parameter \"%s\": initial values of slice %d from rank %d: already there with "
      "other contents",
      parameter, id.slice, id.rank));
}

void InitialValues::Written(const SliceId& id, std::uint64_t digest) {
  digests_[id] = digest;
  missing_.erase(id);
}

void InitialValues::Expect(const StepLayout& layout, int first) {
  expected_ = true;
  const LayoutIndex index(layout);
  for (int i = first; i < index.parameters(); ++i) {
    const StepLayout::Parameter& parameter = layout.parameters[i];
    // Names tied with summed gradients share the first one's values.
    if (parameter.state != i) continue;
    for (std::int64_t rank = 0; rank < std::ssize(parameter.slices_of_rank); ++rank) {
      for (std::int64_t k = 0; k < index.Slices(i, rank); ++k) {
        const SliceId id{i, rank, index.Number(i, rank, k), 0};
        if (digests_.count(id) > 0) continue;
        missing_.insert(id);
        names_[id.parameter] = parameter.name;
      }
    }
  }
}

std::vector<std::string> InitialValues::MissingNames(std::size_t limit) const {
  std::vector<std::string> names;
  int last = -1;
  for (const SliceId& id : missing_) {
    if (id.parameter == last) continue;
    if (names.size() == limit) break;
    last = id.parameter;
    names.push_back(names_.at(id.parameter));
  }
  return names;
}

bool InitialValues::MissingFrom(std::int64_t rank) const {
  return std::any_of(missing_.begin(), missing_.end(),
                     [rank](const SliceId& id) { return id.rank == rank; });
}

}  // namespace muond
