#include "server/registry/matrix_view.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "proto/check.h"

namespace muond {
namespace {

absl::Status Refuse(const std::string& name, const std::string& cause) {
  return absl::InvalidArgumentError(absl::StrFormat("parameter \"%s\": %s", name, cause));
}

bool HasRank(Kind kind, const Dims& shape) {
  const std::size_t rank = shape.size();
  switch (kind) {
    case Kind::kMatrix:
      return rank == 2;
    case Kind::kExperts:
      return rank == 3;
    case Kind::kConv:
      return rank >= 3;
    case Kind::kVector:
      return rank == 1;
    case Kind::kScalar:
      return std::all_of(shape.begin(), shape.end(), [](std::int64_t dim) { return dim == 1; });
    case Kind::kUnspecified:
      break;
  }
  return false;
}

// OK iff the split's blocks are exactly `rows` rows.
absl::Status CheckSplit(const std::string& name, const RowSplit& split, std::int64_t rows) {
  std::int64_t per_group = 0;
  for (const std::int64_t size : split.sizes) {
    if (size < 1 || __builtin_add_overflow(per_group, size, &per_group)) {
      return Refuse(name, absl::StrFormat("split: expected sizes of 1 row or more, got %s",
                                          DimsToString(split.sizes)));
    }
  }
  std::int64_t total = 0;
  if (split.groups < 1 || __builtin_mul_overflow(per_group, split.groups, &total) ||
      total != rows) {
    return Refuse(name, absl::StrFormat(
                            "split: %d group(s) of sizes %s, %d rows each, don't tile the %d rows",
                            split.groups, DimsToString(split.sizes), per_group, rows));
  }
  return absl::OkStatus();
}

// Appends the blocks of the matrix whose first row is `base`.
void AppendBlocks(const RowSplit& split, std::int64_t base, std::int64_t rows, std::int64_t cols,
                  std::vector<MatrixBlock>* blocks) {
  if (split.sizes.empty()) {
    blocks->push_back({rows, cols, {{base, rows}}});
    return;
  }
  const std::int64_t per_group = rows / split.groups;
  std::int64_t before = 0;  // rows of the earlier blocks within one group
  for (const std::int64_t size : split.sizes) {
    const auto part = [&](std::int64_t group) {
      return base + (split.interleaved ? group * per_group + before
                                       : split.groups * before + group * size);
    };
    if (split.per_head) {
      for (std::int64_t g = 0; g < split.groups; ++g) {
        blocks->push_back({size, cols, {{part(g), size}}});
      }
    } else {
      MatrixBlock block{size * split.groups, cols, {}};
      for (std::int64_t g = 0; g < split.groups; ++g) {
        if (!block.ranges.empty() &&
            block.ranges.back().begin + block.ranges.back().count == part(g)) {
          block.ranges.back().count += size;
        } else {
          block.ranges.push_back({part(g), size});
        }
      }
      blocks->push_back(std::move(block));
    }
    before += size;
  }
}

}  // namespace

absl::StatusOr<Kind> ResolveKind(const std::string& name, const Dims& shape, Kind kind) {
  if (kind == Kind::kUnspecified) {
    switch (shape.size()) {
      case 0:
        return Kind::kScalar;
      case 1:
        return Kind::kVector;
      case 2:
        return Kind::kMatrix;
      default:
        return Refuse(name, absl::StrFormat("shape %s without a kind: experts or conv would be a "
                                            "guess: declare the kind",
                                            DimsToString(shape)));
    }
  }
  if (!HasRank(kind, shape)) {
    return Refuse(name, absl::StrFormat("kind %s does not fit shape %s", KindName(kind),
                                        DimsToString(shape)));
  }
  return kind;
}

absl::StatusOr<std::vector<MatrixBlock>> MatrixBlocks(const std::string& name, const Dims& shape,
                                                      Kind kind, const RowSplit& split) {
  MUOND_ASSIGN_OR_RETURN(kind, ResolveKind(name, shape, kind));
  if (kind == Kind::kVector || kind == Kind::kScalar) {
    return Refuse(name, absl::StrFormat("a %s has no matrix view", KindName(kind)));
  }
  const absl::StatusOr<std::int64_t> elements = ElementCount(shape);
  if (!elements.ok()) return Refuse(name, std::string(elements.status().message()));
  if (*elements == 0) return std::vector<MatrixBlock>();
  const bool experts = kind == Kind::kExperts;
  const std::int64_t count = experts ? shape[0] : 1;
  const std::int64_t rows = experts ? shape[1] : shape[0];
  const std::int64_t cols = *elements / count / rows;
  std::int64_t ranges = count;
  if (!split.sizes.empty()) {
    MUOND_RETURN_IF_ERROR(CheckSplit(name, split, rows));
    // sizes x groups <= rows once the split tiles them: no overflow.
    ranges *= static_cast<std::int64_t>(split.sizes.size()) * split.groups;
  }
  if (ranges > kRowRangesMax) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "parameter \"%s\": shape %s has %d matrices to orthogonalize or parts of them, at most %d "
        "are served",
        name, DimsToString(shape), ranges, kRowRangesMax));
  }
  std::vector<MatrixBlock> blocks;
  for (std::int64_t i = 0; i < count; ++i) AppendBlocks(split, i * rows, rows, cols, &blocks);
  return blocks;
}

bool Degenerate(const std::vector<MatrixBlock>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [](const MatrixBlock& b) { return b.rows == 1 || b.cols == 1; });
}

double ShapeFactorOf(ShapeFactor rule, double extra_factor, std::int64_t rows, std::int64_t cols) {
  const double m = static_cast<double>(rows);
  const double n = static_cast<double>(cols);
  double factor = 1;
  switch (rule) {
    case ShapeFactor::kOriginal:
      factor = std::sqrt(std::max(1.0, m / n));
      break;
    case ShapeFactor::kMatchRmsAdamW:
      factor = 0.2 * std::sqrt(std::max(m, n));
      break;
    case ShapeFactor::kUnitRms:
      factor = std::sqrt(m / n);
      break;
    case ShapeFactor::kSpectralMax:
      factor = std::sqrt(std::max(m, n));
      break;
    case ShapeFactor::kNone:
      break;
  }
  return factor * extra_factor;
}

}  // namespace muond
