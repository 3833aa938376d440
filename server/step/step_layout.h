// What the step machine must know of a run's parameters and slices, and how contributions to a
// gradient are named. Plain values, and an index over them that never changes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace muond {

// A digest of the registry, fixed while a run is open.
struct StepLayout {
  struct Parameter {
    std::string name;
    bool replicated = false;
    // Index of the parameter that holds the state: its own, or the first of its tie. Names of one
    // tie are all replicated or none is (checked): their sum has one divisor.
    int state = 0;
    // Slices of this name by rank; empty vector or 0: the rank holds none of it. A name tied as the
    // same tensor to an earlier one, or without elements, has none on any rank.
    std::vector<std::int64_t> slices_of_rank;
  };
  std::int64_t world_size = 1;
  std::vector<Parameter> parameters;  // registration order
};

// One slice of one parameter's gradient in one micro-batch from one rank.
struct SliceId {
  int parameter = 0;  // index into StepLayout::parameters
  std::int64_t rank = 0;
  std::int64_t slice = 0;
  std::int64_t micro_batch = 0;
  friend auto operator<=>(const SliceId&, const SliceId&) = default;
};

// A gradient is the sum of its layers, in this order. A layer is one whole tensor: of a sliced
// parameter all ranks' boxes in one micro-batch (rank is -1), of a replicated one a single rank's.
struct Layer {
  std::int64_t micro_batch = 0;
  std::int64_t rank = -1;
  int parameter = 0;  // differs from the state's index for tied names
  friend auto operator<=>(const Layer&, const Layer&) = default;
};

// A layout with the sums and look-ups that each step needs. Immutable, so that copies of a machine
// may share one.
class LayoutIndex {
 public:
  // Checked: states name themselves, names are unique, nothing counts below zero.
  explicit LayoutIndex(StepLayout layout);

  const StepLayout& layout() const { return layout_; }
  std::int64_t world_size() const { return layout_.world_size; }
  int parameters() const { return static_cast<int>(layout_.parameters.size()); }
  const StepLayout::Parameter& parameter(int p) const { return layout_.parameters[p]; }

  int Find(const std::string& name) const;  // -1: no such parameter
  std::int64_t Slices(int p, std::int64_t rank) const;
  std::int64_t Slices(int p) const { return totals_[p]; }    // of all ranks
  std::int64_t Holders(int p) const { return holders_[p]; }  // ranks with slices of it
  std::int64_t Slices() const { return slices_; }            // of all ranks and parameters
  // The parameters whose gradients make up that of `state`, ascending; none unless it is a state.
  const std::vector<int>& NamesOf(int state) const { return names_[state]; }

 private:
  StepLayout layout_;
  std::map<std::string, int> by_name_;
  std::vector<std::int64_t> totals_, holders_;
  std::vector<std::vector<int>> names_;
  std::int64_t slices_ = 0;
};

}  // namespace muond
