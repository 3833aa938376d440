// What a rank holds of a run, and whether a list of buffers fits it: the checks of a caller's input
// that need no daemon. What fails here was never sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/session.h"
#include "proto/values.h"

namespace muond::client {

class SliceTable {
 public:
  // Both must outlive the table and stay as they are. A copy of neither is made.
  SliceTable(const RunSpec& spec, std::int64_t rank, const RankSlices& slices);

  // OK iff each source is a slice of this rank with as many elements as its box has, with data, a
  // micro-batch in [0, micro_batches), and none is there twice. `action` is for messages: "push".
  // NOT_FOUND for parameters and slices that are not there, else INVALID_ARGUMENT.
  absl::Status Check(const std::string& action, std::span<const SliceSource> sources,
                     std::int64_t micro_batches) const;

  // Likewise; the element type must be the parameter's, or f32 when `master`.
  absl::Status Check(std::span<const SliceSink> sinks, bool master) const;

  // Whether this rank holds that slice: NOT_FOUND.
  absl::Status CheckHeld(const std::string& parameter, std::int64_t slice) const;

  // The box of a slice that has passed a check.
  const Box& BoxOf(const std::string& parameter, std::int64_t slice) const;

  // OK iff each name is a parameter of the run.
  absl::Status CheckNames(const std::string& action, std::span<const std::string> names) const;

 private:
  absl::Status CheckSlice(const std::string& action, const std::string& parameter,
                          std::int64_t slice, const void* data, std::int64_t elements) const;

  const RankSlices& slices_;
  std::int64_t rank_;
  std::unordered_map<std::string, const ParameterSpec*> parameters_;
};

}  // namespace muond::client
