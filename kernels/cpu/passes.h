// The elementwise passes over one block, compiled once per instruction set from one source.
//
// Every instruction set gives the same bits: elements are computed in fp64 without contraction and
// rounded once; sums run over kLanes fixed lanes, element i of a block in lane i mod kLanes.
// Pointers of type void may have any alignment, float pointers that of a float. Any thread.
//
// This header is included where the compiler may use instructions that the running processor
// lacks, so it has no inline functions: the linker could pick that copy for everyone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace muond::kernels::cpu {

// What one block of values looks like. Non-finite elements count as 0 in the sum and the maximum.
struct BlockStats {
  std::uint64_t nonfinite;
  double max_abs;
  double sum_squares;
};

// `elements` values of a gradient: float(data[i]) * unscale in fp32, then times `scale` in fp64.
struct GradientBlock {
  const void* data;
  Dtype dtype;
  float unscale;
  double scale;
  std::size_t elements;
};

// M <- M + (1 - beta)(G - M) where `ema`, else M <- beta M + G; U from the new M as it is kept,
// times u_scale, a power of two.
struct MomentumWeights {
  bool ema;
  bool nesterov;
  double beta;
  double u_scale;
  Dtype m_dtype = Dtype::kF32;  // or kBF16
};

// Where the block's new weights also go, rounded to nearest even; null: nowhere.
struct RoundedBlock {
  void* data;
  Dtype dtype;
};

// W <- decay W - step m / (sqrt(v) v_factor + eps), with the new m and v.
struct AdamWWeights {
  double beta1, beta2, eps, decay;
  double step;      // lr / (1 - beta1^t)
  double v_factor;  // 1 / sqrt(1 - beta2^t)
};

struct Passes {
  const char* isa;  // "avx512", "avx2", "sse2": what the compiler was allowed to use
  void (*accumulate)(float* acc, const void* data, Dtype dtype, std::size_t elements, bool first);
  // Of a gradient, or of state with factors of 1.
  void (*scan)(const GradientBlock& gradient, BlockStats* stats);
  void (*round)(void* dst, Dtype dtype, const float* src, std::size_t elements);
  // M is written, and `stats` filled, only where write_m.
  void (*momentum)(const GradientBlock& gradient, const MomentumWeights& weights, void* m,
                   bool write_m, float* u, BlockStats* stats);
  void (*apply)(float* w, const float* o, std::size_t elements, double decay, double step,
                RoundedBlock rounded, BlockStats* stats);
  // stats[0..2] are those of the new w, m and v.
  void (*adamw)(const GradientBlock& gradient, const AdamWWeights& weights, float* w, float* m,
                float* v, RoundedBlock rounded, BlockStats* stats);
  // dst[i] = src[i] * factor, the product in fp64. dst may be src.
  void (*scale)(float* dst, const float* src, double factor, std::size_t elements);
  // dst (cols x rows) = src^T (rows x cols), not overlapping; strides in floats between rows.
  void (*transpose)(const float* src, std::int64_t src_stride, std::int64_t rows, std::int64_t cols,
                    float* dst, std::int64_t dst_stride);
};

// The tables that this processor can run, fastest first; the last one runs on any x86-64. The list
// ends with null.
const Passes* const* SupportedPasses();

}  // namespace muond::kernels::cpu
