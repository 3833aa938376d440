// The values of the optimizer service: what a run, a parameter, a slice and a step are, free of
// protobuf, gRPC and any state. The server's pure modules and the clients speak in these;
// proto/convert.h turns messages into them and back.
//
// All are plain values: copyable, comparable where a comparison is needed, no thread rule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace muond {

using kernels::Dtype;
using kernels::DtypeBytes;

// ---- Shapes and boxes -------------------------------------------------------------------------

using Dims = std::vector<std::int64_t>;

// "[4096, 1024]"; "[]" for a scalar.
std::string DimsToString(const Dims& dims);

// The product of dims; 1 for a scalar. INVALID_ARGUMENT when a dim is negative, the rank is above
// kMaxRank or the product (in fp64 bytes) would not fit in 63 bits.
absl::StatusOr<std::int64_t> ElementCount(const Dims& dims);

inline constexpr std::size_t kMaxRank = 8;

// An axis-aligned box of a logical tensor: elements with offset[d] <= index[d] < offset[d]+size[d].
// A flat range of a ZeRO partition is a box of the flattened tensor: `flat` is then true and both
// vectors have one entry, in elements of the row-major tensor.
struct Box {
  Dims offset;
  Dims size;
  bool flat = false;

  std::int64_t Elements() const;
  std::string ToString() const;  // "[0:2, 4:8]", "flat [0:1024]"
  friend bool operator==(const Box&, const Box&) = default;
};

// The box that is the whole tensor.
Box WholeBox(const Dims& shape);

// OK iff the box has the tensor's rank (or is flat), non-negative extents and lies inside it.
absl::Status ValidateBox(const Box& box, const Dims& shape);

// Calls visit(tensor_offset, box_offset, count) for each maximal run of elements that is contiguous
// both in the row-major tensor and in the row-major box, in ascending box order, restricted to box
// elements [first, first + count). All in elements. The box must be valid for the shape.
template <typename Visitor>
void ForEachRun(const Box& box, const Dims& shape, std::int64_t first, std::int64_t count,
                Visitor&& visit);

// ---- Parameters -------------------------------------------------------------------------------

// What the tensor is to the layer that owns it (semantics.md, routing).
enum class Kind : std::uint8_t { kUnspecified, kMatrix, kExperts, kConv, kVector, kScalar };
enum class Role : std::uint8_t {
  kUnspecified, kHidden, kEmbedding, kLmHead, kNorm, kBias, kOther
};
enum class Algorithm : std::uint8_t { kAuto, kMuon, kAdamW };
enum class TieReduction : std::uint8_t {
  kSum,   // the tied names' gradients are summed
  kSame,  // they are one tensor: only the first registered name is pushed
};

std::string_view KindName(Kind kind);            // "matrix", ...; "unspecified"
std::string_view RoleName(Role role);            // "hidden", ...
std::string_view AlgorithmName(Algorithm value); // "auto", "muon", "adamw"

// A row split of a matrix whose rows belong to several projections (fused QKV): each block of rows
// is orthogonalized on its own. Rows are grouped: `sizes` rows per group, repeated `groups` times.
struct RowSplit {
  std::vector<std::int64_t> sizes;  // rows of each block within one group; empty: no split
  std::int64_t groups = 1;          // rows == groups * sum(sizes)
  // Interleaved: group 0's blocks, then group 1's, ...; a block then gathers its rows from every
  // group. Contiguous (false): block 0 of all groups, then block 1 of all groups, ...
  bool interleaved = false;
  bool per_head = false;            // each group's part of a block is a matrix of its own
  friend bool operator==(const RowSplit&, const RowSplit&) = default;
};

struct ParameterSpec {
  std::string name;                // logical name, unique in the run
  std::optional<Dims> shape;       // the layer's shape; missing: an error that names the parameter
  bool allow_empty = false;        // a shape with zero elements is meant, not a placeholder
  Dtype dtype = Dtype::kF32;       // of parameters sent back and of gradients by default
  std::string group;               // name of a GroupSpec
  Kind kind = Kind::kUnspecified;
  Role role = Role::kUnspecified;
  bool exclude = false;            // explicitly not for Muon
  bool replicated = false;         // each rank with a slice holds the whole gradient: reduced
  std::string tie;                 // tie id; empty: not tied
  TieReduction tie_reduction = TieReduction::kSum;
  RowSplit split;
  friend bool operator==(const ParameterSpec&, const ParameterSpec&) = default;
};

// ---- Groups and hyperparameters ---------------------------------------------------------------

enum class WeightDecayForm : std::uint8_t {
  kDecoupled,    // W <- (1 - lr * weight_decay) W
  kIndependent,  // W <- (1 - weight_decay) W
};
enum class ShapeFactor : std::uint8_t {
  kOriginal,        // sqrt(max(1, rows / cols))
  kMatchRmsAdamW,   // 0.2 sqrt(max(rows, cols))
  kUnitRms,         // sqrt(rows / cols)
  kSpectralMax,     // sqrt(max(rows, cols))
  kNone,            // 1
};

// What may change at every step, per group.
struct Hyperparameters {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;  // Muon's beta
  double beta1 = 0.9;      // AdamW
  double beta2 = 0.999;
  double eps = 1e-8;
  friend bool operator==(const Hyperparameters&, const Hyperparameters&) = default;
};

// INVALID_ARGUMENT naming the group, the field and the value unless every field is finite and in
// range: 0 <= lr, weight_decay <= 1e30, 0 <= momentum, beta1, beta2 < 1, eps > 0.
absl::Status ValidateHyperparameters(const std::string& group, const Hyperparameters& value);

// What is fixed for the life of a run, per group.
struct GroupSpec {
  std::string name;
  Algorithm algorithm = Algorithm::kAuto;
  // Both halves of an `auto` group take lr and weight_decay from here; each algorithm reads its own
  // fields only.
  Hyperparameters muon;
  Hyperparameters adamw{.weight_decay = 0.01};
  bool nesterov = true;
  bool momentum_sum_form = false;      // M <- beta M + G instead of the ema form
  Dtype momentum_dtype = Dtype::kF32;  // of Muon's M as it is kept: kF32 or kBF16
  std::string coefficients = "simple"; // a named set, or "custom" with custom_steps
  std::vector<double> custom_steps;    // a, b, c per step
  std::int64_t ns_steps = 0;           // 0: the set's length; any other value must equal it
  std::string ns_method = "auto";      // auto, standard, gram
  double norm_floor = 0;
  ShapeFactor shape_factor = ShapeFactor::kOriginal;
  double extra_factor = 1.0;
  WeightDecayForm weight_decay_form = WeightDecayForm::kDecoupled;  // Muon's; AdamW's never changes
  friend bool operator==(const GroupSpec&, const GroupSpec&) = default;
};

// A name pattern (RE2, matched against the whole name) that decides for parameters of `auto`
// groups. The first match wins. A pattern never counts as an explicit exclusion.
struct RoutingRule {
  std::string pattern;
  Algorithm algorithm = Algorithm::kAuto;
  friend bool operator==(const RoutingRule&, const RoutingRule&) = default;
};

// ---- The run ----------------------------------------------------------------------------------

enum class LossScaleMode : std::uint8_t { kNone, kStatic, kDynamic, kExternal };
enum class LossScalePolicy : std::uint8_t { kTorch, kDeepSpeed, kMegatron };

struct LossScaleSpec {
  LossScaleMode mode = LossScaleMode::kNone;
  LossScalePolicy policy = LossScalePolicy::kTorch;
  double initial = 65536;          // static: the scale
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t window = 0;         // 0: the policy's default (torch 2000, else 1000)
  std::int64_t hysteresis = 0;     // 0: the policy's default (torch 1, else 2)
  double minimum = 0;              // 0: the policy's default (torch: none, else 1)
  std::int64_t error_after = 0;    // 0: stay at the minimum for ever
  friend bool operator==(const LossScaleSpec&, const LossScaleSpec&) = default;
};

enum class ClipPolicy : std::uint8_t { kAdamWOnly, kAll };
enum class Reduction : std::uint8_t { kMean, kSum };

// Everything that all trainer ranks of a run must agree on. Compared as a whole at Register.
struct RunSpec {
  std::string name;                     // [A-Za-z0-9][A-Za-z0-9._-]{0,127}
  std::int64_t world_size = 1;          // trainer ranks
  std::vector<ParameterSpec> parameters;
  std::vector<GroupSpec> groups;
  std::vector<RoutingRule> rules;
  LossScaleSpec loss_scale;
  double max_grad_norm = 0;             // 0: no clipping
  ClipPolicy clip_policy = ClipPolicy::kAdamWOnly;
  double grad_norm_skip_threshold = 0;  // 0: off
  Reduction reduce_ranks = Reduction::kMean;         // over the ranks of replicated parameters
  Reduction reduce_micro_batches = Reduction::kSum;  // over the micro-batches of one step
  // The first parameter of each addition to the open run, ascending, none at 0.
  std::vector<std::int64_t> additions;
  friend bool operator==(const RunSpec&, const RunSpec&) = default;
};

// The boxes that one rank holds, by parameter name. A parameter may have several.
using RankSlices = std::map<std::string, std::vector<Box>>;

// What is added to an open run: appended to its groups and parameters, and to what the rank holds.
struct ParameterAddition {
  std::vector<GroupSpec> groups;  // new ones
  std::vector<ParameterSpec> parameters;
  RankSlices slices;  // of these parameters
};
// The run with it, as one more of its additions.
RunSpec Extended(RunSpec spec, const std::vector<GroupSpec>& groups,
                 const std::vector<ParameterSpec>& parameters);

// ---- Steps ------------------------------------------------------------------------------------

enum class SkipCause : std::uint8_t {
  kNone, kOverflow, kStateOverflow, kNormThreshold, kTrainer
};
std::string_view SkipCauseName(SkipCause cause);  // "", "overflow", "state_overflow", ...

// What all ranks must say alike when they begin a step.
struct StepBegin {
  std::int64_t step = 0;
  double loss_scale = 1.0;              // the scale that the gradients are made with
  std::int64_t micro_batches = 1;
  // By group; a group that is missing keeps its last values.
  std::map<std::string, Hyperparameters> muon;
  std::map<std::string, Hyperparameters> adamw;
  friend bool operator==(const StepBegin&, const StepBegin&) = default;
};

// What became of a step; cached, so that a repeated Finish gets the identical answer.
struct StepOutcome {
  std::int64_t step = 0;
  bool applied = false;
  SkipCause cause = SkipCause::kNone;
  double loss_scale = 1.0;              // that the gradients were made with
  double next_loss_scale = 1.0;
  double grad_norm = 0;                 // unscaled, before clipping; never NaN: 0 on overflow
  double clip_coefficient = 1.0;
  std::int64_t applied_steps = 0;       // of the run, this one included
  std::int64_t skipped_steps = 0;
  std::int64_t consecutive_skips = 0;
  std::int64_t newton_schulz_calls = 0; // in this step
  std::int64_t newton_schulz_fallbacks = 0;
  std::int64_t zero_inputs = 0;
  std::int64_t nonfinite_elements = 0;  // of the reduced gradients, all parameters
  std::int64_t version = 0;             // steps consumed so far, applied or skipped
  // Parameters whose gradient held non-finite elements, at most 8 names, registration order.
  std::vector<std::string> offenders;
  friend bool operator==(const StepOutcome&, const StepOutcome&) = default;
};

// ---- Names ------------------------------------------------------------------------------------

// OK iff `name` matches [A-Za-z0-9][A-Za-z0-9._-]{0,127}; `what` names the object in the message.
absl::Status ValidateName(std::string_view what, const std::string& name);

// OK iff 1..limit bytes, printable ASCII without quotes or backslash (parameter names use / and :).
absl::Status ValidateParameterName(const std::string& name, std::size_t limit = 256);

// ---- Implementation of ForEachRun -------------------------------------------------------------

template <typename Visitor>
void ForEachRun(const Box& box, const Dims& shape, std::int64_t first, std::int64_t count,
                Visitor&& visit) {
  if (count <= 0) return;
  if (box.flat || shape.empty()) {
    const std::int64_t base = box.offset.empty() ? 0 : box.offset[0];
    visit(base + first, first, count);
    return;
  }
  // Trailing dimensions that the box covers whole merge into one contiguous run.
  const int rank = static_cast<int>(shape.size());
  int inner = rank - 1;
  std::int64_t run = box.size[inner];
  std::int64_t inner_stride = 1;
  while (inner > 0 && box.size[inner] == shape[inner]) {
    inner_stride *= shape[inner];
    --inner;
    run *= box.size[inner];
  }
  if (run == 0) return;
  for (std::int64_t at = first, end = first + count; at < end;) {
    std::int64_t outer = at / run;  // which run of the box
    const std::int64_t within = at % run;
    std::int64_t tensor = 0;
    std::int64_t stride = inner_stride;
    tensor += box.offset[inner] * stride;
    stride *= shape[inner];
    for (int d = inner - 1; d >= 0; --d) {
      tensor += (box.offset[d] + outer % box.size[d]) * stride;
      outer /= box.size[d];
      stride *= shape[d];
    }
    const std::int64_t length = std::min(run - within, end - at);
    visit(tensor + within, at, length);
    at += length;
  }
}

}  // namespace muond
