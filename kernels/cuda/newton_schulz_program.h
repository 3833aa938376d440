// Newton-Schulz as a list of products: which operand lies where, in which order.
//
// Everything stays in the orientation in which it is stored: a tall matrix is its wide view stored
// column by column, and the products are chosen so that nothing is ever transposed. Both forms give
// a matrix and its transpose results that are transposes of each other, bit by bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/newton_schulz_passes.h"

namespace muond::kernels::cuda {

// The form that a rule comes to for a rows x cols matrix; a function of these alone, so that a
// matrix is computed in the same way in any batch.
NewtonSchulzMethod ChooseForm(const NewtonSchulzRule& rule, std::int64_t rows, std::int64_t cols);

// m x m matrices that the form needs.
int SquareCount(NewtonSchulzMethod form);

// Where one matrix and its scratch are. Row strides are multiples of 8, addresses of 16 bytes.
struct ProgramBuffers {
  GemmOperand u;                         // input, rows x cols, stored times any factor
  GemmOperand o;                         // output, rows x cols
  GemmOperand spare;                     // rows x cols
  GemmOperand squares[5];                // m x m, m = min(rows, cols)
  const NormScalars* scalars = nullptr;  // of u as stored; in device memory
  float* sums = nullptr;                 // SumsOf(rows, cols): sums of squares of the output
};

// phases[i] are products that may run at the same time, after those of phase i - 1. The lists of
// several matrices may be run side by side, phase by phase.
std::vector<std::vector<GemmOp>> NewtonSchulzPhases(std::span<const NewtonSchulzStep> steps,
                                                    NewtonSchulzMethod form, std::int64_t rows,
                                                    std::int64_t cols,
                                                    const ProgramBuffers& buffers);

}  // namespace muond::kernels::cuda
