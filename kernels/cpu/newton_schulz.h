// Newton-Schulz in fp32 on the CPU: standard and Gram form, result check, fallback.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/workers.h"
#include "kernels/host_memory.h"

namespace muond::kernels::cpu {

// The method that kAuto, and kGram where it may not run, come to. `m` <= `n`.
NewtonSchulzMethod ChooseMethod(const NewtonSchulzRule& rule, std::int64_t m, std::int64_t n);

// Small matrices run side by side, one thread each; large ones, or a handful, one after another
// with all threads. Both cut a matrix into the same pieces, so the bits are the same.
class NewtonSchulzSolver {
 public:
  // `workers` and `fault` outlive the solver; `fault` may be null.
  NewtonSchulzSolver(Workers* workers, const Passes* passes, NewtonSchulzFault* fault);

  // Backend::NewtonSchulz. One caller at a time.
  Error Run(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
            std::span<NewtonSchulzResult> results);

  // Scratch kept for jobs of at most rows x cols.
  std::size_t ScratchBytes(std::int64_t rows, std::int64_t cols) const;

 private:
  Workers* workers_;
  const Passes* passes_;
  NewtonSchulzFault* fault_;
  std::vector<HostScratch> scratch_;  // one per thread
};

}  // namespace muond::kernels::cpu
