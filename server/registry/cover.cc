#include "server/registry/cover.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"

namespace muond {
namespace {

// Elements [begin, end) along one dimension, or of the flattened tensor.
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// An axis-aligned box over the merged dimensions of a Grid.
using Piece = std::array<Interval, kMaxRank>;

// Where an element of a box stands in the flattened tensor.
std::int64_t Locate(const Box& box, const Dims& shape, std::int64_t element) {
  std::int64_t place = 0;
  ForEachRun(box, shape, element, 1,
             [&place](std::int64_t at, std::int64_t, std::int64_t) { place = at; });
  return place;
}

// The interval of the flattened tensor that a box is, if it is one; the box has elements.
std::optional<Interval> AsInterval(const Box& box, const Dims& shape) {
  const std::int64_t elements = box.Elements();
  const std::int64_t begin = Locate(box, shape, 0);
  // Contiguous exactly when the first and the last element are the box's elements apart.
  if (Locate(box, shape, elements - 1) - begin + 1 != elements) return std::nullopt;
  return Interval{begin, begin + elements};
}

// All boxes as pieces over as few dimensions as tell them apart. Row blocks, flat ranges and whole
// tensors need one, column blocks and 2-D blocks two, whatever the rank of the tensor: nothing here
// ever counts the runs of a box.
class Grid {
 public:
  Grid(const Dims& shape, const std::vector<OwnedBox>& boxes) {
    std::vector<Interval> ranges;
    std::vector<const Box*> blocks;
    for (const OwnedBox& owned : boxes) {
      if (owned.box.Elements() == 0) continue;
      if (const auto interval = AsInterval(owned.box, shape)) {
        ranges.push_back(*interval);
      } else {
        blocks.push_back(&owned.box);
      }
    }
    MergeDims(shape, blocks);
    for (const Interval& range : ranges) Decompose(0, range, Piece{});
  }

  // First element of the flattened tensor that lies in two pieces; nullopt when there is none or
  // the work ran out.
  std::optional<std::int64_t> FirstOverlap() { return First(/*want_gap=*/false); }
  // First element that lies in no piece.
  std::optional<std::int64_t> FirstGap() { return First(/*want_gap=*/true); }
  // True when the pieces were too entangled to look at all of them.
  bool gave_up() const { return work_ > kWorkMax; }

 private:
  // Pieces looked at before giving up, a fraction of a second: grids of 100,000s of blocks stay far
  // below, boxes that are staggered in every dimension grow with a power of their number.
  static constexpr std::int64_t kWorkMax = 20'000'000;

  // Sets dims_ to the shape with every dimension merged into the one before that no block cuts
  // (or that lies below a dimension of one), and pieces_ to the blocks over these.
  void MergeDims(const Dims& shape, const std::vector<const Box*>& blocks) {
    pieces_.resize(blocks.size());
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const bool uncut = std::all_of(blocks.begin(), blocks.end(),
                                     [&](const Box* b) { return b->size[d] == shape[d]; });
      if (dims_.empty() || (!uncut && dims_.back() != 1)) {
        dims_.push_back(1);
        for (Piece& piece : pieces_) piece[dims_.size() - 1] = {0, 1};
      }
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        // Either the range so far covers its dimension's one element, or this one is not cut.
        Interval& along = pieces_[i][dims_.size() - 1];
        const std::int64_t begin = blocks[i]->offset[d];
        along = uncut ? Interval{along.begin * shape[d], along.end * shape[d]}
                      : Interval{begin, begin + blocks[i]->size[d]};
      }
      dims_.back() *= shape[d];
    }
    if (dims_.empty()) dims_.push_back(1);
    strides_.assign(dims_.size(), 1);
    for (std::size_t d = dims_.size() - 1; d > 0; --d) strides_[d - 1] = strides_[d] * dims_[d];
  }

  // Adds the pieces of a flat range that lies within one index of dimension d - 1: a head, whole
  // rows, a tail.
  void Decompose(std::size_t d, Interval range, Piece piece) {
    const std::int64_t stride = strides_[d];
    std::int64_t first = range.begin / stride;
    const std::int64_t last = range.end / stride;
    const std::int64_t head = range.begin % stride;
    const std::int64_t tail = range.end % stride;
    if (first == last) {
      piece[d] = {first, first + 1};
      Decompose(d + 1, {head, tail}, piece);
      return;
    }
    if (head > 0) {
      piece[d] = {first, first + 1};
      Decompose(d + 1, {head, stride}, piece);
      ++first;
    }
    if (tail > 0) {
      piece[d] = {last, last + 1};
      Decompose(d + 1, {0, tail}, piece);
    }
    if (first < last) {
      piece[d] = {first, last};
      for (std::size_t inner = d + 1; inner < dims_.size(); ++inner)
        piece[inner] = {0, dims_[inner]};
      pieces_.push_back(piece);
    }
  }

  std::optional<std::int64_t> First(bool want_gap) {
    work_ = 0;
    std::vector<const Piece*> all;
    all.reserve(pieces_.size());
    for (const Piece& piece : pieces_) all.push_back(&piece);
    return FirstIn(0, std::move(all), want_gap);
  }

  // The first bad element of the subtensor over dimensions d..., as an offset in it, when exactly
  // `pieces` reach into it. Along a slab between two neighbouring bounds of dimension d every index
  // sees the same pieces, so that the first index stands for all; slabs ascend, and with them the
  // flattened elements.
  std::optional<std::int64_t> FirstIn(std::size_t d, std::vector<const Piece*> pieces,
                                      bool want_gap) {
    work_ += static_cast<std::int64_t>(pieces.size());
    if (gave_up()) return std::nullopt;
    if (pieces.empty()) return want_gap ? std::optional<std::int64_t>(0) : std::nullopt;
    std::sort(pieces.begin(), pieces.end(),
              [d](const Piece* a, const Piece* b) { return (*a)[d].begin < (*b)[d].begin; });
    if (d + 1 == dims_.size()) return FirstInRow(pieces, want_gap);
    std::vector<const Piece*> active;
    std::size_t next = 0;
    for (std::int64_t at = 0; at < dims_[d] && !gave_up();) {
      std::erase_if(active, [&](const Piece* p) { return (*p)[d].end <= at; });
      while (next < pieces.size() && (*pieces[next])[d].begin == at)
        active.push_back(pieces[next++]);
      if (const auto bad = FirstIn(d + 1, active, want_gap)) return at * strides_[d] + *bad;
      std::int64_t end = next < pieces.size() ? (*pieces[next])[d].begin : dims_[d];
      for (const Piece* p : active) end = std::min(end, (*p)[d].end);
      at = end;
    }
    return std::nullopt;
  }

  // The last dimension: `row` are intervals by ascending begin.
  std::optional<std::int64_t> FirstInRow(const std::vector<const Piece*>& row,
                                         bool want_gap) const {
    const std::size_t d = dims_.size() - 1;
    std::int64_t covered = 0;
    for (const Piece* piece : row) {
      const Interval& along = (*piece)[d];
      if (want_gap ? along.begin > covered : along.begin < covered) {
        return want_gap ? covered : along.begin;
      }
      covered = std::max(covered, along.end);
    }
    if (want_gap && covered < dims_[d]) return covered;
    return std::nullopt;
  }

  Dims dims_;
  Dims strides_;
  std::vector<Piece> pieces_;
  std::int64_t work_ = 0;
};

// The longest contiguous elements of the box from the first one on that is not before `from`.
std::optional<Interval> NextRun(const Box& box, const Dims& shape, std::int64_t from) {
  const std::int64_t elements = box.Elements();
  // Elements ascend in box and tensor alike, so that both ends are binary searches.
  std::int64_t first = 0;
  for (std::int64_t end = elements; first < end;) {
    const std::int64_t middle = first + (end - first) / 2;
    if (Locate(box, shape, middle) < from) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  if (first == elements) return std::nullopt;
  const std::int64_t begin = Locate(box, shape, first);
  std::int64_t last = first;
  for (std::int64_t end = elements; last + 1 < end;) {
    const std::int64_t middle = last + (end - last) / 2;
    const bool contiguous = Locate(box, shape, middle) - begin == middle - first;
    (contiguous ? last : end) = middle;
  }
  return Interval{begin, begin + (last - first) + 1};
}

absl::Status TooFragmented(const std::string& parameter, std::size_t boxes) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "parameter \"%s\": %d slices are too entangled to prove that they tile the tensor: use fewer "
      "or more regular ones",
      parameter, boxes));
}

absl::Status OverlapAt(const std::string& parameter, const Dims& shape,
                       const std::vector<OwnedBox>& boxes, std::int64_t element) {
  std::vector<std::int64_t> ranks;
  std::int64_t end = 0;
  for (const OwnedBox& owned : boxes) {
    const auto run = NextRun(owned.box, shape, element);
    if (!run.has_value() || run->begin != element || ranks.size() == 2) continue;
    end = ranks.empty() ? run->end : std::min(end, run->end);
    ranks.push_back(owned.rank);
  }
  const std::string who = ranks[0] == ranks[1]
                              ? absl::StrFormat("rank %d", ranks[0])
                              : absl::StrFormat("ranks %d and %d", ranks[0], ranks[1]);
  return absl::InvalidArgumentError(absl::StrFormat(
      "parameter \"%s\": slices of %s overlap at elements [%d, %d)", parameter, who, element, end));
}

absl::Status GapAt(const std::string& parameter, const Dims& shape,
                   const std::vector<OwnedBox>& boxes, std::int64_t element) {
  const std::int64_t elements = WholeBox(shape).Elements();
  std::int64_t end = elements;
  for (const OwnedBox& owned : boxes) {
    const auto run = NextRun(owned.box, shape, element);
    if (run.has_value()) end = std::min(end, run->begin);
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("parameter \"%s\": elements [%d, %d) of %d are in no rank's slices",
                      parameter, element, end, elements));
}

}  // namespace

absl::Status CheckNoOverlap(const std::string& parameter, const Dims& shape,
                            const std::vector<OwnedBox>& boxes) {
  if (boxes.size() < 2) return absl::OkStatus();
  Grid grid(shape, boxes);
  const auto element = grid.FirstOverlap();
  if (element.has_value()) return OverlapAt(parameter, shape, boxes, *element);
  return grid.gave_up() ? TooFragmented(parameter, boxes.size()) : absl::OkStatus();
}

absl::Status CheckExactCover(const std::string& parameter, const Dims& shape,
                             const std::vector<OwnedBox>& boxes) {
  absl::Status status = CheckNoOverlap(parameter, shape, boxes);
  if (!status.ok()) return status;
  // Disjoint boxes inside the tensor cover it exactly when their elements add up.
  std::int64_t covered = 0;
  for (const OwnedBox& owned : boxes) covered += owned.box.Elements();
  if (covered == WholeBox(shape).Elements()) return absl::OkStatus();
  Grid grid(shape, boxes);
  const auto element = grid.FirstGap();
  if (element.has_value()) return GapAt(parameter, shape, boxes, *element);
  return TooFragmented(parameter, boxes.size());
}

}  // namespace muond
