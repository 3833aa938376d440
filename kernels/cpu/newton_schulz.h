// Newton-Schulz on the CPU: which iteration a matrix gets, result check, fallback, threads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/workers.h"
#include "kernels/host_memory.h"

namespace muond::kernels::cpu {

// How a matrix is iterated; see iteration.h.
struct Plan {
  bool bf16 = false;
  bool gram = false;  // fp32: the Gram form; bf16: steps in pairs

  friend bool operator==(const Plan&, const Plan&) = default;
};

// The plan for an m x n matrix, m <= n. kAuto and kBF16 need HasBF16Products().
Plan ChoosePlan(const NewtonSchulzRule& rule, std::int64_t m, std::int64_t n, Products products);

// Most matrices run side by side, one thread each, which needs no waiting for each other; huge
// ones, and those that would leave threads idle, one after another with all threads. Both cut a
// matrix into the same pieces: the bits are the same.
class NewtonSchulzSolver {
 public:
  // `workers`, `passes` and `fault` outlive the solver; `fault` may be null. kAuto and kBF16 need
  // HasBF16Products().
  NewtonSchulzSolver(Workers* workers, const Passes* passes, Products products,
                     NewtonSchulzFault* fault);

  // Backend::NewtonSchulz. One caller at a time.
  Error Run(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
            std::span<NewtonSchulzResult> results);

  // Scratch kept for jobs of at most rows x cols.
  std::size_t ScratchBytes(std::int64_t rows, std::int64_t cols) const;

 private:
  void Solve(const Loop& loop, const MatrixJob& job, const NewtonSchulzRule& rule,
             HostScratch& scratch, NewtonSchulzResult& result) const;

  // Fills the two lists.
  void Divide(std::span<const MatrixJob> jobs);

  Workers* workers_;
  const Passes* passes_;
  const F32Gemm* gemm_;
  Products products_;
  NewtonSchulzFault* fault_;
  std::vector<HostScratch> scratch_;  // one per thread
  // The jobs of a call that get all threads, one after another, and those that get one thread each.
  std::vector<std::size_t> together_, alone_;
};

}  // namespace muond::kernels::cpu
