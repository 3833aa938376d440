#include "client/c/convert.h"

#include "proto/check.h"
#include "proto/convert.h"

namespace muond::c {
namespace {

// What sources and sinks have in common; a reserved field that is set asks for what this version
// does not know.
template <typename Slice>
absl::Status CheckSlice(const char* action, const Slice& slice) {
  const std::string name = Text(slice.parameter, slice.parameter_bytes);
  if (slice.memory != MUOND_HOST && slice.memory != MUOND_CUDA) {
    return absl::UnimplementedError(absl::StrFormat(
        "parameter \"%s\": %s: memory %d: this version knows host memory (%d) and CUDA's (%d)",
        name, action, slice.memory, static_cast<int>(MUOND_HOST), static_cast<int>(MUOND_CUDA)));
  }
  const bool host = slice.memory == MUOND_HOST;
  if (slice.reserved != 0 || (host && (slice.stream != nullptr || slice.device != 0))) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "parameter \"%s\": %s: %s", name, action,
        host ? "stream, device and reserved must be zero for host memory"
             : "reserved must be zero"));
  }
  if (!host && slice.device < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("parameter \"%s\": %s: device %d: expected 0 "
                                                      "or more",
                                                      name, action, slice.device));
  }
  return absl::OkStatus();
}

// Fills what C++'s sources and sinks have in common.
template <typename To, typename From>
absl::StatusOr<std::vector<To>> Convert(const char* action, const From* slices, size_t count) {
  if (count > 0) MUOND_RETURN_IF_ERROR(CheckThere(action, slices));
  std::vector<To> converted(count);
  for (size_t i = 0; i < count; ++i) {
    MUOND_RETURN_IF_ERROR(CheckSlice(action, slices[i]));
    converted[i].parameter = Text(slices[i].parameter, slices[i].parameter_bytes);
    converted[i].slice = slices[i].slice;
    converted[i].data = slices[i].data;
    converted[i].elements = slices[i].elements;
    const absl::StatusOr<Dtype> dtype = FromProto(static_cast<v1::Dtype>(slices[i].dtype));
    if (!dtype.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter \"%s\": %s: dtype: unknown value %d", converted[i].parameter,
                          action, slices[i].dtype));
    }
    converted[i].dtype = *dtype;
    if (slices[i].memory == MUOND_CUDA) {
      converted[i].place = {.device = slices[i].device, .stream = slices[i].stream};
    }
  }
  return converted;
}

}  // namespace

absl::StatusOr<std::vector<client::SliceSource>> Sources(const char* action,
                                                         const muond_source* sources,
                                                         size_t count) {
  auto converted = Convert<client::SliceSource>(action, sources, count);
  if (!converted.ok()) return converted;
  for (size_t i = 0; i < count; ++i) (*converted)[i].micro_batch = sources[i].micro_batch;
  return converted;
}

absl::StatusOr<std::vector<client::SliceSink>> Sinks(const char* action, const muond_sink* sinks,
                                                     size_t count) {
  return Convert<client::SliceSink>(action, sinks, count);
}

}  // namespace muond::c
