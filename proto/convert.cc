// Conversions of parameters, boxes and what both are made of.
#include "proto/convert.h"

#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/convert_internal.h"

namespace muond {

using internal::About;
using internal::CastEnum;

static_assert(static_cast<int>(Kind::kScalar) == v1::Kind_MAX);
static_assert(static_cast<int>(Role::kOther) == v1::Role_MAX);
static_assert(static_cast<int>(Algorithm::kAdamW) == v1::Algorithm_MAX);
static_assert(static_cast<int>(TieReduction::kSame) == v1::Parameter::TieReduction_MAX);
// The wire's numbers leave 0 to "missing"; tensor.h has no such value.
static_assert(static_cast<int>(Dtype::kF32) + 1 == v1::DTYPE_F32);
static_assert(static_cast<int>(Dtype::kBF16) + 1 == v1::DTYPE_BF16);
static_assert(static_cast<int>(Dtype::kF16) + 1 == v1::DTYPE_F16);
static_assert(v1::Dtype_MAX == v1::DTYPE_F16);

absl::StatusOr<Dtype> FromProto(v1::Dtype dtype) {
  if (dtype == v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError("dtype: missing: expected F32, BF16 or F16");
  }
  MUOND_ASSIGN_OR_RETURN(const int number, CastEnum<int>("dtype", dtype, v1::Dtype_IsValid(dtype)));
  return static_cast<Dtype>(number - 1);
}

v1::Dtype ToProto(Dtype dtype) { return static_cast<v1::Dtype>(static_cast<int>(dtype) + 1); }

absl::StatusOr<Algorithm> FromProto(v1::Algorithm algorithm) {
  return CastEnum<Algorithm>("algorithm", algorithm, v1::Algorithm_IsValid(algorithm));
}

v1::Algorithm ToProto(Algorithm algorithm) { return static_cast<v1::Algorithm>(algorithm); }

namespace {

// Whether the blocks tile the rows is for the matrix view to say.
absl::StatusOr<RowSplit> SplitFromProto(const v1::RowSplit& message) {
  for (const std::int64_t size : message.sizes()) {
    if (size < 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("split: expected sizes of at least 1 row, got %d", size));
    }
  }
  MUOND_RETURN_IF_ERROR(internal::CheckNotNegative("split: groups", message.groups()));
  RowSplit split;
  split.sizes.assign(message.sizes().begin(), message.sizes().end());
  split.groups = message.groups() == 0 ? 1 : message.groups();
  split.interleaved = message.interleaved();
  split.per_head = message.per_head();
  return split;
}

absl::Status FillParameter(const v1::Parameter& message, ParameterSpec* value) {
  if (message.has_shape()) {
    value->shape.emplace(message.shape().dims().begin(), message.shape().dims().end());
    MUOND_RETURN_IF_ERROR(ElementCount(*value->shape).status());
  }
  value->allow_empty = message.allow_empty();
  MUOND_ASSIGN_OR_RETURN(value->dtype, FromProto(message.dtype()));
  MUOND_RETURN_IF_ERROR(ValidateName("group", message.group()));
  value->group = message.group();
  MUOND_ASSIGN_OR_RETURN(value->kind,
                         CastEnum<Kind>("kind", message.kind(), v1::Kind_IsValid(message.kind())));
  MUOND_ASSIGN_OR_RETURN(value->role,
                         CastEnum<Role>("role", message.role(), v1::Role_IsValid(message.role())));
  value->exclude = message.exclude();
  value->replicated = message.replicated();
  if (!message.tie().empty() && !ValidateParameterName(message.tie()).ok()) {
    return absl::InvalidArgumentError(
        "tie: expected an id of at most 256 printable ASCII characters without quotes");
  }
  value->tie = message.tie();
  MUOND_ASSIGN_OR_RETURN(
      value->tie_reduction,
      CastEnum<TieReduction>("tie_reduction", message.tie_reduction(),
                             v1::Parameter::TieReduction_IsValid(message.tie_reduction())));
  MUOND_ASSIGN_OR_RETURN(value->split, SplitFromProto(message.split()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ParameterSpec> FromProto(const v1::Parameter& message) {
  MUOND_RETURN_IF_ERROR(ValidateParameterName(message.name()));
  ParameterSpec value;
  value.name = message.name();
  const absl::Status status = FillParameter(message, &value);
  if (!status.ok()) return About(absl::StrFormat("parameter \"%s\"", value.name), status);
  return value;
}

v1::Parameter ToProto(const ParameterSpec& value) {
  v1::Parameter message;
  message.set_name(value.name);
  if (value.shape.has_value()) {
    message.mutable_shape()->mutable_dims()->Add(value.shape->begin(), value.shape->end());
  }
  message.set_allow_empty(value.allow_empty);
  message.set_dtype(ToProto(value.dtype));
  message.set_group(value.group);
  message.set_kind(static_cast<v1::Kind>(value.kind));
  message.set_role(static_cast<v1::Role>(value.role));
  message.set_exclude(value.exclude);
  message.set_replicated(value.replicated);
  message.set_tie(value.tie);
  message.set_tie_reduction(static_cast<v1::Parameter::TieReduction>(value.tie_reduction));
  if (value.split != RowSplit{}) {
    v1::RowSplit* split = message.mutable_split();
    split->mutable_sizes()->Add(value.split.sizes.begin(), value.split.sizes.end());
    split->set_groups(value.split.groups);
    split->set_interleaved(value.split.interleaved);
    split->set_per_head(value.split.per_head);
  }
  return message;
}

absl::StatusOr<Box> FromProto(const v1::Box& message) {
  Box value;
  value.offset.assign(message.offset().begin(), message.offset().end());
  value.size.assign(message.size().begin(), message.size().end());
  value.flat = message.flat();
  if (value.offset.size() != value.size.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("box: %d offsets, but %d sizes", value.offset.size(), value.size.size()));
  }
  if (value.flat && value.offset.size() != 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "box: a flat range has one offset and one size, got %d of each", value.offset.size()));
  }
  const absl::StatusOr<std::int64_t> elements = ElementCount(value.size);
  if (!elements.ok()) return About("box: sizes", elements.status());
  for (const std::int64_t offset : value.offset) {
    if (offset < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("box: expected offsets >= 0, got %d", offset));
    }
  }
  return value;
}

v1::Box ToProto(const Box& value) {
  v1::Box message;
  message.mutable_offset()->Add(value.offset.begin(), value.offset.end());
  message.mutable_size()->Add(value.size.begin(), value.size.end());
  message.set_flat(value.flat);
  return message;
}

absl::StatusOr<RankSlices> SlicesFromProto(
    const google::protobuf::RepeatedPtrField<v1::ParameterSlices>& message) {
  RankSlices value;
  for (const v1::ParameterSlices& slices : message) {
    MUOND_RETURN_IF_ERROR(ValidateParameterName(slices.parameter()));
    const auto [entry, inserted] = value.try_emplace(slices.parameter());
    if (!inserted) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter \"%s\": slices are listed twice: name each parameter once, with all its boxes",
          slices.parameter()));
    }
    for (const v1::Box& box : slices.boxes()) {
      absl::StatusOr<Box> converted = FromProto(box);
      if (!converted.ok()) {
        return About(
            absl::StrFormat("parameter \"%s\": slice %d", slices.parameter(), entry->second.size()),
            converted.status());
      }
      entry->second.push_back(*std::move(converted));
    }
  }
  return value;
}

void SlicesToProto(const RankSlices& value,
                   google::protobuf::RepeatedPtrField<v1::ParameterSlices>* message) {
  message->Clear();
  for (const auto& [name, boxes] : value) {
    v1::ParameterSlices* slices = message->Add();
    slices->set_parameter(name);
    for (const Box& box : boxes) *slices->add_boxes() = ToProto(box);
  }
}

}  // namespace muond
