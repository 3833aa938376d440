#include "proto/values.h"

#include <cmath>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

// A name as it may stand in a message: what a client sent can be long and need not be text.
std::string Quoted(const std::string& name) {
  constexpr std::size_t kShown = 64;
  const bool cut = name.size() > kShown;
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, kShown)), cut ? "..." : "", "\"");
}

// The product of max(dim, 1), or -1 when 8 bytes of each element don't fit in 63 bits. Counting an
// empty dimension as 1 keeps the strides of empty tensors in range too.
std::int64_t CheckedProduct(const Dims& dims) {
  std::int64_t bytes = 8;
  for (const std::int64_t dim : dims) {
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(dim, 1), &bytes)) return -1;
  }
  return bytes / 8;
}

bool IsAlphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

}  // namespace

std::string DimsToString(const Dims& dims) {
  std::string text = "[";
  for (std::size_t d = 0; d < dims.size(); ++d) {
    if (d > kMaxRank) return absl::StrCat(text, ", ... ", dims.size(), " dimensions]");
    absl::StrAppend(&text, d == 0 ? "" : ", ", dims[d]);
  }
  return text + "]";
}

absl::StatusOr<std::int64_t> ElementCount(const Dims& dims) {
  if (dims.size() > kMaxRank) {
    return absl::InvalidArgumentError(absl::StrFormat("shape %s has rank %d, the largest is %d",
                                                      DimsToString(dims), dims.size(), kMaxRank));
  }
  bool empty = false;
  for (const std::int64_t dim : dims) {
    if (dim < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("shape %s has a negative dimension", DimsToString(dims)));
    }
    empty |= dim == 0;
  }
  const std::int64_t product = CheckedProduct(dims);
  if (product < 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shape %s has more elements than 64 bits can hold the bytes of", DimsToString(dims)));
  }
  return empty ? 0 : product;
}

std::int64_t Box::Elements() const {
  std::int64_t elements = 1;
  for (const std::int64_t extent : size) elements *= extent;
  return elements;
}

std::string Box::ToString() const {
  std::string text = flat ? "flat [" : "[";
  for (std::size_t d = 0; d < offset.size() && d < size.size(); ++d) {
    if (d > kMaxRank) return absl::StrCat(text, ", ...]");
    // An end beyond 63 bits can only come from a box that no check has passed yet.
    std::int64_t end = 0;
    if (__builtin_add_overflow(offset[d], size[d], &end)) {
      end = std::numeric_limits<std::int64_t>::max();
    }
    absl::StrAppend(&text, d == 0 ? "" : ", ", offset[d], ":", end);
  }
  return text + "]";
}

Box WholeBox(const Dims& shape) { return Box{Dims(shape.size(), 0), shape, false}; }

absl::Status ValidateBox(const Box& box, const Dims& shape) {
  Dims bounds = shape;
  if (box.flat) {
    MUOND_ASSIGN_OR_RETURN(const std::int64_t elements, ElementCount(shape));
    bounds = {elements};
  }
  if (box.offset.size() != bounds.size() || box.size.size() != bounds.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "box with %d offsets and %d sizes does not fit shape %s: expected %d of each",
        box.offset.size(), box.size.size(), DimsToString(shape), bounds.size()));
  }
  for (std::size_t d = 0; d < bounds.size(); ++d) {
    // Compared without a sum: offset + size may not fit in 64 bits.
    if (box.offset[d] < 0 || box.size[d] < 0 || box.offset[d] > bounds[d] - box.size[d]) {
      return absl::InvalidArgumentError(
          absl::StrFormat("box %s lies outside shape %s", box.ToString(), DimsToString(shape)));
    }
  }
  return absl::OkStatus();
}

std::string_view KindName(Kind kind) {
  switch (kind) {
    case Kind::kUnspecified:
      return "unspecified";
    case Kind::kMatrix:
      return "matrix";
    case Kind::kExperts:
      return "experts";
    case Kind::kConv:
      return "conv";
    case Kind::kVector:
      return "vector";
    case Kind::kScalar:
      return "scalar";
  }
  return "unknown";
}

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kUnspecified:
      return "unspecified";
    case Role::kHidden:
      return "hidden";
    case Role::kEmbedding:
      return "embedding";
    case Role::kLmHead:
      return "lm_head";
    case Role::kNorm:
      return "norm";
    case Role::kBias:
      return "bias";
    case Role::kOther:
      return "other";
  }
  return "unknown";
}

std::string_view AlgorithmName(Algorithm value) {
  switch (value) {
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kMuon:
      return "muon";
    case Algorithm::kAdamW:
      return "adamw";
  }
  return "unknown";
}

std::string_view SkipCauseName(SkipCause cause) {
  switch (cause) {
    case SkipCause::kNone:
      return "";
    case SkipCause::kOverflow:
      return "overflow";
    case SkipCause::kStateOverflow:
      return "state_overflow";
    case SkipCause::kNormThreshold:
      return "norm_threshold";
    case SkipCause::kTrainer:
      return "trainer";
  }
  return "unknown";
}

// Far above any use, far below where products of rates and fp32 state would leave fp64.
constexpr double kRateMax = 1e30;

absl::Status ValidateHyperparameters(const std::string& group, const Hyperparameters& value) {
  const auto refuse = [&group](const char* field, double got, const char* range) {
    return absl::InvalidArgumentError(
        absl::StrFormat("group %s: %s: expected %s, got %g", Quoted(group), field, range, got));
  };
  const struct {
    const char* name;
    double value;
  } rates[] = {{"lr", value.lr}, {"weight_decay", value.weight_decay}},
    decays[] = {{"momentum", value.momentum}, {"beta1", value.beta1}, {"beta2", value.beta2}};
  // Written so that NaN, which compares false with everything, is refused.
  for (const auto& rate : rates) {
    if (!(rate.value >= 0 && rate.value <= kRateMax)) {
      return refuse(rate.name, rate.value, "a number from 0 to 1e30");
    }
  }
  for (const auto& decay : decays) {
    if (!(decay.value >= 0 && decay.value < 1)) {
      return refuse(decay.name, decay.value, "0 <= value < 1");
    }
  }
  if (!(std::isfinite(value.eps) && value.eps > 0)) {
    return refuse("eps", value.eps, "a finite number > 0");
  }
  return absl::OkStatus();
}

RunSpec Extended(RunSpec spec, const std::vector<GroupSpec>& groups,
                 const std::vector<ParameterSpec>& parameters) {
  spec.additions.push_back(static_cast<std::int64_t>(spec.parameters.size()));
  spec.groups.insert(spec.groups.end(), groups.begin(), groups.end());
  spec.parameters.insert(spec.parameters.end(), parameters.begin(), parameters.end());
  return spec;
}

absl::Status ValidateName(std::string_view what, const std::string& name) {
  bool good = !name.empty() && name.size() <= 128 && IsAlphanumeric(name[0]);
  for (const char c : name) {
    good = good && (IsAlphanumeric(c) || c == '.' || c == '_' || c == '-');
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s name %s: expected [A-Za-z0-9][A-Za-z0-9._-]{0,127}", what, Quoted(name)));
}

absl::Status ValidateParameterName(const std::string& name, std::size_t limit) {
  bool good = !name.empty() && name.size() <= limit;
  for (const char c : name) {
    good = good && c >= ' ' && c <= '~' && c != '"' && c != '\'' && c != '\\';
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "parameter name %s: expected 1 to %d printable ASCII characters without quotes and backslash",
      Quoted(name), limit));
}

}  // namespace muond
