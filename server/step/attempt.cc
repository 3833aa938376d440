#include "server/step/attempt.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/check.h"
#include "server/step/verdict.h"

namespace muond {

std::set<std::int64_t> Attempt::Participants() const {
  std::set<std::int64_t> ranks = begun_;
  for (const auto& [rank, word] : skipped_) ranks.insert(rank);
  return ranks;
}

void Attempt::Begin(std::int64_t rank, const StepBegin& begin) {
  MUOND_CHECK(!begin_ || *begin_ == begin, "all ranks began alike");
  begin_ = begin;
  begun_.insert(rank);
}

const std::uint64_t* Attempt::Digest(const SliceId& id) const {
  const auto found = digests_.find(id);
  return found == digests_.end() ? nullptr : &found->second;
}

void Attempt::Accept(const SliceId& id, std::uint64_t digest) {
  MUOND_CHECK(Begun(id.rank), "slices come after Begin");
  MUOND_CHECK(digests_.emplace(id, digest).second, "a slice counts once");
  ++received_[id.parameter];
}

bool Attempt::Pushed(int p, std::int64_t rank) const {
  const auto first = digests_.lower_bound(SliceId{p, rank, 0, 0});
  return first != digests_.end() && first->first.parameter == p && first->first.rank == rank;
}

std::set<std::int64_t> Attempt::FinishedRanks() const {
  std::set<std::int64_t> ranks;
  for (const auto& [rank, absent] : finished_) ranks.insert(rank);
  return ranks;
}

bool Attempt::Absent(int p, std::int64_t rank) const {
  const std::set<int>* absent = AbsentOf(rank);
  return absent != nullptr && absent->contains(p);
}

const std::set<int>* Attempt::AbsentOf(std::int64_t rank) const {
  const auto found = finished_.find(rank);
  return found == finished_.end() ? nullptr : &found->second;
}

void Attempt::Finish(std::int64_t rank, std::set<int> absent) {
  const auto count = [&](int p, int sign) {
    const std::int64_t slices = sign * index_->Slices(p, rank);
    absent_slices_[p] += slices;
    absent_slices_total_ += slices;
  };
  for (const int p : finished_[rank]) {
    absent_ranks_[p].erase(rank);
    count(p, -1);
  }
  for (const int p : absent) {
    MUOND_CHECK(index_->Registered(p, rank) > 0 && !Pushed(p, rank),
                "absent means nothing was pushed");
    absent_ranks_[p].insert(rank);
    count(p, 1);
  }
  finished_[rank] = std::move(absent);
}

void Attempt::WithdrawFinishes() {
  finished_.clear();
  absent_ranks_.clear();
  std::fill(absent_slices_.begin(), absent_slices_.end(), 0);
  absent_slices_total_ = 0;
}

absl::Status Attempt::CheckAbsent() const {
  for (const auto& [p, ranks] : absent_ranks_) {
    const StepLayout::Parameter& parameter = index_->parameter(p);
    if (parameter.replicated || ranks.empty() || std::ssize(ranks) == index_->Holders(p)) continue;
    std::vector<std::int64_t> others;
    for (std::int64_t rank = 0; rank < index_->world_size(); ++rank) {
      if (index_->Registered(p, rank) > 0 && !ranks.contains(rank)) others.push_back(rank);
    }
    return absl::FailedPreconditionError(absl::StrFormat(
        "parameter \"%s\": finish of step %d: absent on ranks [%s] but not on ranks [%s]; a sliced "
        "parameter is absent on all ranks or none: push it or name it on all, then finish again",
        parameter.name, begin_->step, absl::StrJoin(ranks, ", "), absl::StrJoin(others, ", ")));
  }
  return absl::OkStatus();
}

std::optional<double> Attempt::NamedScale() const {
  if (begin_) return begin_->loss_scale;
  for (const auto& [rank, word] : skipped_) {
    if (word.loss_scale) return word.loss_scale;
  }
  return std::nullopt;
}

bool Attempt::Arrived(int state) const {
  std::int64_t wanted = 0;
  std::int64_t received = 0;
  for (const int p : index_->NamesOf(state)) {
    wanted += index_->Slices(p) * begin_->micro_batches;
    received += received_[p];
  }
  return wanted > 0 && received == wanted;
}

std::vector<Layer> Attempt::Layers(int state) const {
  std::vector<Layer> layers;
  for (const int p : index_->NamesOf(state)) {
    const StepLayout::Parameter& parameter = index_->parameter(p);
    for (std::int64_t micro_batch = 0; micro_batch < begin_->micro_batches; ++micro_batch) {
      if (!parameter.replicated) {
        if (received_[p] > 0) layers.push_back({micro_batch, -1, p});
        continue;
      }
      for (std::int64_t rank = 0; rank < index_->world_size(); ++rank) {
        if (index_->Slices(p, rank) > 0 && !Absent(p, rank)) {
          layers.push_back({micro_batch, rank, p});
        }
      }
    }
  }
  std::sort(layers.begin(), layers.end());
  return layers;
}

std::vector<std::int64_t> Attempt::MissingRanks() const {
  std::vector<std::int64_t> ranks;
  for (std::int64_t rank = 0; rank < index_->world_size(); ++rank) {
    if (!Finished(rank) && !Skipped(rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::int64_t Attempt::MissingSlices() const {
  if (!begin_ || !skipped_.empty()) return 0;
  return (index_->Slices() - absent_slices_total_) * begin_->micro_batches - std::ssize(digests_);
}

std::int64_t Attempt::MissingSlices(int p) const {
  return (index_->Slices(p) - absent_slices_[p]) * begin_->micro_batches - received_[p];
}

std::string Attempt::DescribeMissing() const {
  std::vector<std::string> parts;
  if (const std::vector<std::int64_t> ranks = MissingRanks(); !ranks.empty()) {
    parts.push_back(absl::StrFormat("ranks [%s]", absl::StrJoin(ranks, ", ")));
  }
  std::size_t named = 0;
  std::size_t unnamed = 0;
  if (MissingSlices() > 0) {
    for (int p = 0; p < index_->parameters(); ++p) {
      if (MissingSlices(p) == 0) continue;
      if (named == kMaxNames) {
        ++unnamed;
        continue;
      }
      ++named;
      parts.push_back(DescribeMissing(p));
    }
  }
  if (unnamed > 0) parts.push_back(absl::StrFormat("%d more parameters", unnamed));
  return absl::StrJoin(parts, "; ");
}

std::string Attempt::DescribeMissing(int p) const {
  // The first rank and micro-batch with a gap, in words; the rest as a number.
  std::vector<std::int64_t> slices;
  std::int64_t at_rank = 0;
  std::int64_t at_micro_batch = 0;
  std::int64_t here = 0;
  for (std::int64_t rank = 0; rank < index_->world_size() && here == 0; ++rank) {
    if (index_->Slices(p, rank) == 0 || Absent(p, rank)) continue;
    for (std::int64_t micro = 0; micro < begin_->micro_batches && here == 0; ++micro) {
      for (std::int64_t k = 0; k < index_->Slices(p, rank); ++k) {
        const std::int64_t slice = index_->Number(p, rank, k);
        if (Digest({p, rank, slice, micro}) != nullptr) continue;
        if (slices.size() < kMaxNames) slices.push_back(slice);
        ++here;
      }
      at_rank = rank;
      at_micro_batch = micro;
    }
  }
  std::string text = absl::StrFormat("parameter \"%s\": slices [%s] of rank %d in micro-batch %d",
                                     index_->parameter(p).name, absl::StrJoin(slices, ", "),
                                     at_rank, at_micro_batch);
  const std::int64_t more = MissingSlices(p) - std::ssize(slices);
  if (more > 0) absl::StrAppendFormat(&text, " and %d more", more);
  return text;
}

}  // namespace muond
