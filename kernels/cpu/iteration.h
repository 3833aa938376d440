// One Newton-Schulz iteration of one matrix, in fp32 and in bf16.
//
// m = min(rows, cols), n = max(rows, cols): a tall matrix is iterated as its transpose, and gets
// exactly the transpose's bits. Failures are thrown (std::exception). Thread rule: one call per
// scratch at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/workers.h"

namespace muond::kernels::cpu {

struct IterationTools {
  const Loop& loop;
  const Passes& passes;
  const F32Gemm& gemm;
};

// Statistics of `count` floats, summed in block order.
BlockStats Observe(const IterationTools& tools, const float* data, std::int64_t count);

// 1 / max(|U|_F, floor): what U is multiplied with. 0 for U = 0; NaN where U is not finite, which
// is the caller's or the hardware's fault and must come out as a failed result.
double NormalizingFactor(const BlockStats& u, double floor);

// Fills job.o; false when U = 0. `scratch` has room for F32ScratchFloats(m, n, gram) floats.
bool IterateF32(const IterationTools& tools, const MatrixJob& job, const NewtonSchulzRule& rule,
                bool gram, float* scratch);
std::size_t F32ScratchFloats(std::int64_t m, std::int64_t n, bool gram);

// Likewise, with bf16 products (HasBF16Products()) and at least one step. X itself and every
// matrix's diagonal stay in fp32. `paired`: two steps share one product with X where they can, 2 1
// 2 for five steps; more than two in a row would let rounding grow in null directions.
bool IterateBF16(const IterationTools& tools, const MatrixJob& job, const NewtonSchulzRule& rule,
                 bool paired, float* scratch);
std::size_t BF16ScratchFloats(std::int64_t m, std::int64_t n);

}  // namespace muond::kernels::cpu
