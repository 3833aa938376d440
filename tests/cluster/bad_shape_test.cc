// Parameters and slices that can't be: refused by name and cause, without a trace.
#include <limits>
#include <vector>

#include "tests/cluster/bad_registration.h"

namespace muond::cluster {
namespace {

using absl::StatusCode;

const std::vector<Registration> kShapeCases = {
    {"EmptyModel",
     StatusCode::kInvalidArgument,
     {"run \"new\"", "no parameters"},
     [](auto& request) {
       request.mutable_run()->clear_parameters();
       request.clear_slices();
     }},
    {"MissingShape",
     StatusCode::kInvalidArgument,
     {"parameter \"w\"", "shape is missing", "placeholder"},
     [](auto& request) { W(request).clear_shape(); }},
    {"PlaceholderShape",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "shape [0]", "placeholder"},
     Shape({0})},
    {"RankOfNine",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "9"},
     Shape({1, 1, 1, 1, 1, 1, 1, 1, 1})},
    {"NegativeDim", StatusCode::kInvalidArgument, {"parameter \"p\"", "-4"}, Shape({-4})},
    {"OverflowingDims",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "[4294967296, 4294967296]"},
     Shape({std::int64_t{1} << 32, std::int64_t{1} << 32})},
    {"WrappingDims",
     StatusCode::kInvalidArgument,
     {"parameter \"p\""},
     Shape({std::int64_t{1} << 62, 4, 1})},
    {"ThreeGibibytes",
     StatusCode::kResourceExhausted,
     {"parameter \"p\"", "3221225472 bytes", "--max-tensor-bytes"},
     Shape({805306368})},
    {"ShapeOfAShard",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "6", "ds_shape"},
     Shape({6})},
    {"ThreeDimensionsWithoutAKind",
     StatusCode::kInvalidArgument,
     {"parameter \"w\"", "kind"},
     [](auto& request) {
       W(request).set_kind(v1::KIND_UNSPECIFIED);
       W(request).mutable_shape()->add_dims(1);
     }},
    {"KindOfAnotherRank",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "matrix"},
     [](auto& request) { P(request).set_kind(v1::KIND_MATRIX); }},
    {"UnknownKind",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "kind", "44"},
     [](auto& request) { P(request).set_kind(static_cast<v1::Kind>(44)); }},
    {"MissingDtype",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "dtype"},
     [](auto& request) { P(request).set_dtype(v1::DTYPE_UNSPECIFIED); }},
    {"UnknownDtype",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "dtype", "9"},
     [](auto& request) { P(request).set_dtype(static_cast<v1::Dtype>(9)); }},
    {"DuplicateName",
     StatusCode::kAlreadyExists,
     {"parameter \"w\"", "twice"},
     [](auto& request) { *request.mutable_run()->add_parameters() = W(request); }},
    {"EmptyName",
     StatusCode::kInvalidArgument,
     {"name"},
     [](auto& request) { W(request).set_name(""); }},
    {"SplitThatDoesNotTile",
     StatusCode::kInvalidArgument,
     {"parameter \"w\"", "split"},
     [](auto& request) {
       for (const int size : {2, 1}) W(request).mutable_split()->add_sizes(size);
     }},
    {"SplitOfAVector",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "split"},
     [](auto& request) { P(request).mutable_split()->add_sizes(12); }},
    {"Gap", StatusCode::kInvalidArgument, {"parameter \"p\"", "6", "8"}, Ranges({{0, 6}, {8, 12}})},
    {"Overlap",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "6", "7"},
     Ranges({{0, 7}, {6, 12}})},
    {"NoSlices", StatusCode::kInvalidArgument, {"parameter \"p\"", "12"}, Ranges({})},
    {"SliceOutside", StatusCode::kInvalidArgument, {"parameter \"p\"", "13"}, Ranges({{0, 13}})},
    {"NegativeOffset", StatusCode::kInvalidArgument, {"parameter \"p\"", "-1"}, Ranges({{-1, 12}})},
    {"WrappingSlice",
     StatusCode::kInvalidArgument,
     {"parameter \"p\""},
     Ranges({{std::numeric_limits<std::int64_t>::max() - 2,
              std::numeric_limits<std::int64_t>::max()}})},
    {"BoxWithoutSizes",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "1 offsets, but 0 sizes"},
     [](auto& request) {
       Ranges({{0, 12}})(request);
       for (auto& slices : *request.mutable_slices()) {
         if (slices.parameter() == "p") slices.mutable_boxes(0)->clear_size();
       }
     }},
    {"SlicesOfAnUnknownName",
     StatusCode::kNotFound,
     {"parameter \"typo\""},
     [](auto& request) { request.add_slices()->set_parameter("typo"); }},
    {"SlicesListedTwice",
     StatusCode::kInvalidArgument,
     {"parameter \"p\"", "twice"},
     [](auto& request) { request.add_slices()->set_parameter("p"); }},
    {"TiedShapesDiffer",
     StatusCode::kAlreadyExists,
     {"parameter \"v\": tied to \"w\"", "shape"},
     Tied([](v1::Parameter& v) { v.mutable_shape()->set_dims(0, 5); })},
    {"TiedAlgorithmsDiffer",
     StatusCode::kAlreadyExists,
     {"parameter \"v\": tied to \"w\"", "algorithm"},
     Tied([](v1::Parameter& v) { v.set_group("adamw"); })},
    {"TieReductionsDiffer",
     StatusCode::kAlreadyExists,
     {"parameter \"v\"", "tie_reduction"},
     Tied([](v1::Parameter& v) { v.set_tie_reduction(v1::Parameter::TIE_REDUCTION_SAME); })},
};

class BadShape : public ::testing::TestWithParam<Registration> {};

TEST_P(BadShape, IsRefusedByNameAndLeavesNoTrace) { ExpectRefused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Cases, BadShape, ::testing::ValuesIn(kShapeCases), RegistrationName);

}  // namespace
}  // namespace muond::cluster
