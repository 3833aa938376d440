// Which initial values a run has and which it still waits for. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/step/step_machine.h"

namespace muond {

class InitialValues {
 public:
  enum class Arrival : std::uint8_t { kNew, kDuplicate };
  // A slice arrived whole. ALREADY_EXISTS when it came before with another digest.
  absl::StatusOr<Arrival> Check(const SliceId& id, const std::string& parameter,
                                std::uint64_t digest) const;
  // The slice was written to state. Ranks may send before others have joined.
  void Written(const SliceId& id, std::uint64_t digest);

  // All ranks have joined, or parameters were added: from now on it is known what is missing.
  // Nothing is of the parameters below `first`.
  void Expect(const StepLayout& layout, int first);
  bool complete() const { return expected_ && missing_.empty(); }
  // Names of parameters that lack values, registration order, at most `limit`.
  std::vector<std::string> MissingNames(std::size_t limit) const;
  bool MissingFrom(std::int64_t rank) const;
  std::int64_t missing() const { return static_cast<std::int64_t>(missing_.size()); }

 private:
  bool expected_ = false;
  std::set<SliceId> missing_;
  std::map<SliceId, std::uint64_t> digests_;
  std::map<int, std::string> names_;  // of the parameters that are missing something
};

}  // namespace muond
