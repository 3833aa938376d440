// What has come in of one attempt at a step: who began, pushed, finished or skipped, and what is
// still missing. Decides nothing: the step machine asks, judges and concludes. Pure, copyable.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/values.h"
#include "server/step/step_layout.h"

namespace muond {

// What a rank said when it discarded the step on its own word.
struct SkipWord {
  SkipCause cause = SkipCause::kTrainer;
  std::optional<double> loss_scale;  // none: the run's
  friend bool operator==(const SkipWord&, const SkipWord&) = default;
};

class Attempt {
 public:
  Attempt(std::shared_ptr<const LayoutIndex> index, std::int64_t number)
      : index_(std::move(index)),
        number_(number),
        received_(index_->parameters()),
        absent_slices_(index_->parameters()) {}

  std::int64_t number() const { return number_; }
  bool empty() const { return begun_.empty() && skipped_.empty(); }
  // Ranks that have said anything: pushing and finishing need a Begin.
  std::set<std::int64_t> Participants() const;

  // -- Begins. All that began said the same.
  const std::optional<StepBegin>& begin() const { return begin_; }
  const std::set<std::int64_t>& begun() const { return begun_; }
  bool Begun(std::int64_t rank) const { return begun_.contains(rank); }
  void Begin(std::int64_t rank, const StepBegin& begin);

  // -- Slices.
  // The digest of a slice that is in; nullptr: it is not.
  const std::uint64_t* Digest(const SliceId& id) const;
  // The slice must be one of the layout's, of a rank that began, and not be in.
  void Accept(const SliceId& id, std::uint64_t digest);
  bool Pushed(int p, std::int64_t rank) const;  // any slice in any micro-batch
  // The digests of all slices, to be kept when the step has been consumed.
  std::map<SliceId, std::uint64_t> TakeDigests() { return std::move(digests_); }

  // -- Finishes, each with the parameters (held by the rank) that have no gradient from it.
  bool Finished(std::int64_t rank) const { return finished_.contains(rank); }
  bool AnyFinished() const { return !finished_.empty(); }
  bool AllFinished() const { return std::ssize(finished_) == index_->world_size(); }
  std::set<std::int64_t> FinishedRanks() const;
  bool Absent(int p, std::int64_t rank) const;
  const std::set<int>* AbsentOf(std::int64_t rank) const;  // nullptr: not finished
  void Finish(std::int64_t rank, std::set<int> absent);    // replaces an earlier one
  void WithdrawFinishes();
  // A sliced parameter is absent on all ranks that hold slices or on none: else
  // FAILED_PRECONDITION naming the ranks. To be asked once all have finished.
  absl::Status CheckAbsent() const;

  // -- Skips.
  const std::map<std::int64_t, SkipWord>& skipped() const { return skipped_; }
  bool Skipped(std::int64_t rank) const { return skipped_.contains(rank); }
  bool AllSkipped() const { return std::ssize(skipped_) == index_->world_size(); }
  void Skip(std::int64_t rank, const SkipWord& word) { skipped_[rank] = word; }
  // The loss scale that somebody named, in a Begin or a Skip.
  std::optional<double> NamedScale() const;

  // -- What follows.
  // Every slice of every name of `state` is in: nothing that may come can change its layers.
  bool Arrived(int state) const;
  // Ascending; none: the parameter is absent. Final when Arrived, or all finished without a miss.
  std::vector<Layer> Layers(int state) const;
  std::vector<std::int64_t> MissingRanks() const;  // neither finished nor skipped
  std::int64_t MissingSlices() const;              // 0 when nobody began or somebody skipped
  // `ranks [3]; parameter "w": slices [0, 1] of rank 3 in micro-batch 0; ...`, at most kMaxNames
  // parameters; empty when nothing is missing.
  std::string DescribeMissing() const;

 private:
  std::int64_t MissingSlices(int p) const;
  std::string DescribeMissing(int p) const;

  std::shared_ptr<const LayoutIndex> index_;
  std::int64_t number_;
  std::optional<StepBegin> begin_;
  std::set<std::int64_t> begun_;
  std::map<SliceId, std::uint64_t> digests_;
  std::vector<std::int64_t> received_;  // by parameter: slices in, over micro-batches
  std::map<std::int64_t, std::set<int>> finished_;
  std::map<int, std::set<std::int64_t>> absent_ranks_;  // by parameter, of those finished
  std::vector<std::int64_t> absent_slices_;  // by parameter: slices of the ranks named absent
  std::int64_t absent_slices_total_ = 0;
  std::map<std::int64_t, SkipWord> skipped_;
};

}  // namespace muond
