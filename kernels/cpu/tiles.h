// How a matrix is cut into tiles: by its shape alone, so that every number of threads gives the
// same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace muond::kernels::cpu {

// Rows [row, row + rows), columns [col, col + cols).
struct Tile {
  std::int64_t row = 0, col = 0, rows = 0, cols = 0;
};

// The pieces of one side: as few as can be with at most `largest` each, all but the last of one
// size.
class Cut {
 public:
  // Pieces are multiples of 32, but for the last.
  Cut(std::int64_t side, std::int64_t largest) : side_(side) {
    count_ = (side + largest - 1) / largest;
    const std::int64_t even = count_ == 0 ? 0 : (side + count_ - 1) / count_;
    piece_ = (even + 31) / 32 * 32;
    if (piece_ > 0) count_ = (side + piece_ - 1) / piece_;
  }

  std::int64_t count() const { return count_; }
  std::int64_t begin(std::int64_t i) const { return i * piece_; }
  std::int64_t size(std::int64_t i) const { return std::min(piece_, side_ - i * piece_); }

 private:
  std::int64_t side_, count_ = 0, piece_ = 0;
};

// The tiles of the lower triangle of an m x m matrix, row by row. A tile on the diagonal is cut
// once more, and its upper quarter left out.
class Triangle {
 public:
  Triangle(std::int64_t m, std::int64_t largest) : cut_(m, largest) {}

  std::size_t count() const {
    return static_cast<std::size_t>(cut_.count() * (cut_.count() + 1) / 2);
  }

  // body(tile) for the one to three products that tile number t consists of. Those with
  // row == col lie on the diagonal, all others wholly below it.
  template <typename Body>
  void ForEachPart(std::size_t t, const Body& body) const {
    std::int64_t i = 0;
    while (static_cast<std::size_t>((i + 1) * (i + 2) / 2) <= t) ++i;
    const std::int64_t j = static_cast<std::int64_t>(t) - i * (i + 1) / 2;
    const std::int64_t row = cut_.begin(i), rows = cut_.size(i);
    if (i != j) {
      body(Tile{row, cut_.begin(j), rows, cut_.size(j)});
      return;
    }
    const std::int64_t half = (rows / 2 + 31) / 32 * 32;
    if (rows < kWorthCutting) {
      body(Tile{row, row, rows, rows});
      return;
    }
    body(Tile{row, row, half, half});
    body(Tile{row + half, row, rows - half, half});
    body(Tile{row + half, row + half, rows - half, rows - half});
  }

 private:
  // Below this side a product costs less than its call.
  static constexpr std::int64_t kWorthCutting = 128;

  Cut cut_;
};

// All tiles of an m x n matrix.
class Grid {
 public:
  Grid(std::int64_t m, std::int64_t largest_rows, std::int64_t n, std::int64_t largest_cols)
      : rows_(m, largest_rows), cols_(n, largest_cols) {}

  std::size_t count() const { return static_cast<std::size_t>(rows_.count() * cols_.count()); }
  // Column by column: neighbours in time share the columns of the right factor.
  Tile operator[](std::size_t t) const {
    const std::int64_t i = static_cast<std::int64_t>(t) % rows_.count();
    const std::int64_t j = static_cast<std::int64_t>(t) / rows_.count();
    return {rows_.begin(i), cols_.begin(j), rows_.size(i), cols_.size(j)};
  }

 private:
  Cut rows_, cols_;
};

}  // namespace muond::kernels::cpu
