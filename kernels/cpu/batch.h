// One parallel loop over the blocks of many tensors, so that small tensors cost little each.
//
// Blocks of all tensors of a call are numbered through. A block is the same piece of its tensor
// whatever else is in the call, and has a place of its own for its statistics, so neither the batch
// nor the number of threads can be seen in a result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "kernels/cpu/workers.h"

namespace muond::kernels::cpu {

class BlockBatch {
 public:
  // A block holds at most `block` elements of one tensor; the last of a tensor may hold fewer.
  explicit BlockBatch(std::size_t block) : block_(block) {}

  // Cuts tensors of size(jobs[i]) elements. Memory is kept between calls.
  template <typename Job, typename Size>
  void Cut(std::span<const Job> jobs, const Size& size) {
    starts_.resize(jobs.size() + 1);
    sizes_.resize(jobs.size());
    std::size_t blocks = 0;
    elements_ = 0;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      starts_[i] = blocks;
      sizes_[i] = size(jobs[i]);
      elements_ += sizes_[i];
      blocks += (sizes_[i] + block_ - 1) / block_;
    }
    starts_.back() = blocks;
  }

  // All blocks; those of tensor i are First(i) ... First(i + 1) - 1.
  std::size_t blocks() const { return starts_.back(); }
  std::size_t First(std::size_t job) const { return starts_[job]; }

  // body(job, block, begin, elements) for every block, `begin` and `elements` within its tensor.
  template <typename Body>
  void ForEach(Workers& workers, const Body& body) const {
    const auto run = [&](std::size_t first, std::size_t last) {
      // The tensor that block `first` belongs to: the last one that starts no later. Tensors
      // without elements start where their successor does and are passed over.
      auto job = static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), first) -
                                          starts_.begin() - 1);
      for (std::size_t block = first; block < last; ++block) {
        while (block >= starts_[job + 1]) ++job;
        const std::size_t begin = (block - starts_[job]) * block_;
        body(job, block, begin, std::min(block_, sizes_[job] - begin));
      }
    };
    if (elements_ <= block_) {
      run(0, blocks());  // not worth waking anyone
      return;
    }
    workers.ForEachRange(blocks(), run);
  }

 private:
  std::size_t block_;
  std::size_t elements_ = 0;
  std::vector<std::size_t> starts_ = {0};
  std::vector<std::size_t> sizes_;
};

}  // namespace muond::kernels::cpu
