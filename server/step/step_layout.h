// What the step machine must know of a run's parameters and slices, and how contributions to a
// gradient are named. Plain values, and an index over them that never changes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace muond {

// A digest of the registry and the plan, fixed while a run is open. All daemons of a run have the
// same parameters and ranks; they differ in what is here.
struct StepLayout {
  // Which of a parameter's slices have elements in the shards that this daemon owns.
  enum class Here : std::uint8_t { kAll, kSome, kNone };
  struct Parameter {
    std::string name;
    bool replicated = false;
    // Index of the parameter that holds the state: its own, or the first of its tie. Names of one
    // tie are all replicated or none is (checked): their sum has one divisor.
    int state = 0;
    // Slices of this name by rank; empty vector or 0: the rank holds none of it. A name tied as the
    // same tensor to an earlier one, or without elements, has none on any rank.
    std::vector<std::int64_t> slices_of_rank;
    Here here = Here::kAll;
    // Of kSome: the numbers of the slices that reach here by rank, ascending. Names of one tie are
    // cut alike.
    std::map<std::int64_t, std::vector<std::int64_t>> slices_here;
  };
  std::int64_t world_size = 1;
  std::vector<Parameter> parameters;  // registration order
  // The daemons of the run, as messages name them, in the plan's order; one without a name when the
  // run has no other.
  std::vector<std::string> daemons = {""};
  int self = 0;  // this daemon's place among them
  // The daemon that must hold a copy of this one's gradients before this one votes to apply a step;
  // -1: none.
  int buddy = -1;
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

  int daemons() const { return static_cast<int>(layout_.daemons.size()); }
  int self() const { return layout_.self; }
  int buddy() const { return layout_.buddy; }

  int Find(const std::string& name) const;  // -1: no such parameter
  // On any daemon.
  std::int64_t Registered(int p, std::int64_t rank) const;
  std::int64_t Holders(int p) const { return holders_[p]; }  // ranks with slices of it
  // Slices that reach this daemon.
  std::int64_t Slices(int p, std::int64_t rank) const;
  std::int64_t Slices(int p) const { return totals_[p]; }  // of all ranks
  std::int64_t Slices() const { return slices_; }          // of all ranks and parameters
  // The number of the k-th of them, k in [0, Slices(p, rank)).
  std::int64_t Number(int p, std::int64_t rank, std::int64_t k) const;
  bool IsHere(int p, std::int64_t rank, std::int64_t slice) const;
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
