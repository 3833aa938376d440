#include "client/cpp/slice_table.h"

#include <set>
#include <tuple>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond::client {
namespace {

std::string Name(Dtype dtype) { return std::string(kernels::DtypeName(dtype)); }

}  // namespace

SliceTable::SliceTable(const RunSpec& spec, std::int64_t rank, const RankSlices& slices)
    : slices_(slices), rank_(rank) {
  for (const ParameterSpec& parameter : spec.parameters) {
    parameters_.emplace(parameter.name, &parameter);
  }
}

absl::Status SliceTable::CheckHeld(const std::string& parameter, std::int64_t slice) const {
  const auto held = slices_.find(parameter);
  const auto count = held == slices_.end() ? std::int64_t{0} : std::ssize(held->second);
  if (slice >= 0 && slice < count) return absl::OkStatus();
  return absl::NotFoundError(absl::StrFormat("parameter \"%s\": slice %d: rank %d has %d of it",
                                             parameter, slice, rank_, count));
}

absl::Status SliceTable::CheckSlice(const std::string& action, const std::string& parameter,
                                    std::int64_t slice, const void* data,
                                    std::int64_t elements) const {
  if (!parameters_.contains(parameter)) {
    return absl::NotFoundError(
        absl::StrFormat("parameter \"%s\": %s: the run has no such parameter", parameter, action));
  }
  const auto held = slices_.find(parameter);
  const auto count = held == slices_.end() ? std::int64_t{0}
                                           : static_cast<std::int64_t>(held->second.size());
  if (slice < 0 || slice >= count) {
    return absl::NotFoundError(
        absl::StrFormat("parameter \"%s\": %s of slice %d: rank %d registered %d slices of it",
                        parameter, action, slice, rank_, count));
  }
  const Box& box = held->second[static_cast<std::size_t>(slice)];
  if (elements != box.Elements()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter \"%s\": %s of slice %d: expected the %d elements of %s, got %d",
                        parameter, action, slice, box.Elements(), box.ToString(), elements));
  }
  if (data == nullptr && elements > 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": %s of slice %d: data is null", parameter, action, slice));
  }
  return absl::OkStatus();
}

absl::Status SliceTable::Check(const std::string& action, std::span<const SliceSource> sources,
                               std::int64_t micro_batches) const {
  std::set<std::tuple<std::string, std::int64_t, std::int64_t>> seen;
  for (const SliceSource& source : sources) {
    MUOND_RETURN_IF_ERROR(
        CheckSlice(action, source.parameter, source.slice, source.data, source.elements));
    if (source.micro_batch < 0 || source.micro_batch >= micro_batches) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": %s of slice %d: micro-batch %d is not within 0..%d",
          source.parameter, action, source.slice, source.micro_batch, micro_batches - 1));
    }
    if (!seen.emplace(source.parameter, source.slice, source.micro_batch).second) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": %s of slice %d, micro-batch %d: given twice", source.parameter,
          action, source.slice, source.micro_batch));
    }
  }
  return absl::OkStatus();
}

absl::Status SliceTable::Check(std::span<const SliceSink> sinks, bool master) const {
  std::set<std::tuple<std::string, std::int64_t>> seen;
  for (const SliceSink& sink : sinks) {
    MUOND_RETURN_IF_ERROR(
        CheckSlice("pull", sink.parameter, sink.slice, sink.data, sink.elements));
    const Dtype sent = master ? Dtype::kF32 : parameters_.at(sink.parameter)->dtype;
    if (sink.dtype != sent) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": pull of slice %d: the sink takes %s, the %s are %s", sink.parameter,
          sink.slice, Name(sink.dtype), master ? "master weights" : "values", Name(sent)));
    }
    if (!seen.emplace(sink.parameter, sink.slice).second) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": pull of slice %d: given twice", sink.parameter, sink.slice));
    }
  }
  return absl::OkStatus();
}

const Box& SliceTable::BoxOf(const std::string& parameter, std::int64_t slice) const {
  return slices_.at(parameter).at(static_cast<std::size_t>(slice));
}

absl::Status SliceTable::CheckNames(const std::string& action,
                                    std::span<const std::string> names) const {
  for (const std::string& name : names) {
    if (!parameters_.contains(name)) {
      return absl::NotFoundError(
          absl::StrFormat("parameter \"%s\": %s: the run has no such parameter", name, action));
    }
  }
  return absl::OkStatus();
}

}  // namespace muond::client
