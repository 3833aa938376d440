// Messages <-> values, with every check that needs no state: enum values, ranges, names, shapes,
// sizes. What passes is well-formed; whether it fits the run is for the registry and the step
// machine to say. Errors are INVALID_ARGUMENT and name object, field and value.
#pragma once

#include "absl/status/statusor.h"
#include "muond/v1/optimizer.pb.h"
#include "muond/v1/types.pb.h"
#include "proto/values.h"

namespace muond {

absl::StatusOr<Dtype> FromProto(v1::Dtype dtype);
v1::Dtype ToProto(Dtype dtype);

absl::StatusOr<ParameterSpec> FromProto(const v1::Parameter& message);
v1::Parameter ToProto(const ParameterSpec& value);
absl::StatusOr<GroupSpec> FromProto(const v1::Group& message);
v1::Group ToProto(const GroupSpec& value);

absl::StatusOr<RunSpec> FromProto(const v1::Run& message);
v1::Run ToProto(const RunSpec& value);

// Checks signs and that offset and size have equal length; fit to the tensor is checked later.
absl::StatusOr<Box> FromProto(const v1::Box& message);
v1::Box ToProto(const Box& value);

absl::StatusOr<RankSlices> SlicesFromProto(
    const google::protobuf::RepeatedPtrField<v1::ParameterSlices>& message);
void SlicesToProto(const RankSlices& value,
                   google::protobuf::RepeatedPtrField<v1::ParameterSlices>* message);

// Hyperparameters of Begin are validated here: finite, in range, group named in the error.
absl::StatusOr<StepBegin> FromProto(const v1::BeginRequest& message);
void ToProto(const StepBegin& value, v1::BeginRequest* message);

v1::Hyperparameters ToProto(const Hyperparameters& value);

absl::StatusOr<SkipCause> FromProto(v1::SkipCause cause);
v1::SkipCause ToProto(SkipCause cause);

StepOutcome FromProto(const v1::StepOutcome& message);
v1::StepOutcome ToProto(const StepOutcome& value);

v1::Algorithm ToProto(Algorithm algorithm);
absl::StatusOr<Algorithm> FromProto(v1::Algorithm algorithm);

}  // namespace muond
