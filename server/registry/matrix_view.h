// How a logical tensor becomes the matrices that Newton-Schulz sees. Decided on the logical shape
// only. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/values.h"

namespace muond {

// Rows [begin, begin + count) of the tensor's row-major 2-D view.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// One matrix to orthogonalize: the rows of `ranges`, in order, each `cols` elements.
struct MatrixBlock {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<RowRange> ranges;  // one range: contiguous in the tensor
  friend bool operator==(const MatrixBlock&, const MatrixBlock&) = default;
};

// What a tensor is: the declared kind, or by rank where none was declared (0-D scalar, 1-D vector,
// 2-D matrix). INVALID_ARGUMENT naming `name` when kind and rank disagree, and for three dimensions
// and more without a kind: an expert stack and a convolution look alike.
absl::StatusOr<Kind> ResolveKind(const std::string& name, const Dims& shape, Kind kind);

// Most row ranges that the matrices of one tensor may have, so that no shape ((2^29, 1, 1) experts)
// makes the service list more than it could ever orthogonalize.
inline constexpr std::int64_t kRowRangesMax = std::int64_t{1} << 20;

// The matrices of a tensor of this shape, kind and split: matrix -> one; experts (e, m, n) -> e of
// m x n; conv (out, ...) -> one of out x rest; a row split -> its blocks (per group when per_head),
// of every expert where there are several, in the order of the split's sizes.
// INVALID_ARGUMENT naming `name` when kind and rank disagree, the kind has no matrices or the split
// does not tile the rows; RESOURCE_EXHAUSTED beyond kRowRangesMax. No matrices without elements.
absl::StatusOr<std::vector<MatrixBlock>> MatrixBlocks(const std::string& name, const Dims& shape,
                                                      Kind kind, const RowSplit& split);

// True when every matrix is a single row or column: Newton-Schulz then only normalizes a vector.
bool Degenerate(const std::vector<MatrixBlock>& blocks);

// The factor on the learning rate of one block: sqrt(max(1, rows/cols)) and so on, times
// `extra_factor`. rows and cols are those of the block, never of the tensor or its shard.
double ShapeFactorOf(ShapeFactor rule, double extra_factor, std::int64_t rows, std::int64_t cols);

}  // namespace muond
