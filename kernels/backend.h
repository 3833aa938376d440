// How an update is computed: one interface, several implementations (`reference`, `cpu`).
//
// The engine decides what to compute and when; a backend knows only pointers, sizes and numbers.
// All pointers are in the backend's own memory (Allocate). Formulas: docs/semantics.md; their
// sources are torch.optim.Muon, torch.optim.AdamW and KellerJordan/Muon.
//
// Determinism: with the same arguments a backend returns the same bits, whatever its number of
// threads and whatever else is in the batch. Thread rule: one caller at a time per Backend object,
// but Allocate and Free may be called from any thread at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"

namespace muond::kernels {

// What one pass over a reduced gradient finds. Sums and maxima are of unscaled values.
struct GradientScan {
  std::uint64_t nonfinite = 0;     // NaN and infinite elements; when > 0 the sums mean nothing
  double max_abs = 0;              // max |G| over the finite elements
  std::vector<double> block_sums;  // sum of G^2 in fp64 per block of kBlockElements elements
};

// Facts about state just written, gathered in the same pass. They feed the next step's
// state-overflow check and the health metrics.
struct StateScan {
  std::uint64_t nonfinite = 0;
  double max_abs = 0;
  double sum_squares = 0;  // fp64, in block order
};

enum class MomentumForm : std::uint8_t {
  kEma = 0,  // M <- M + (1 - beta)(G - M), the default (torch.optim.Muon)
  kSum = 1,  // M <- beta M + G (KellerJordan's first form)
};

struct MomentumRule {
  MomentumForm form = MomentumForm::kEma;
  double beta = 0.95;
  bool nesterov = true;
  double gradient_scale = 1.0;  // clip coefficient under clip policy `all`, else 1
};

// One Newton-Schulz step: A = X X^T; X <- a X + (b A + c A^2) X.
struct NewtonSchulzStep {
  double a, b, c;
};

enum class NewtonSchulzMethod : std::uint8_t {
  kAuto = 0,      // the backend's choice per shape, by measurement
  kStandard = 1,  // products with X in every step
  kGram = 2,      // iterate on X X^T, restart after step 2; square matrices and lists of steps
                  // that are not gram-safe (kernels/coefficients.h) use kStandard
};

struct NewtonSchulzRule {
  std::vector<NewtonSchulzStep> steps;
  NewtonSchulzMethod method = NewtonSchulzMethod::kAuto;
  double norm_floor = 0;  // X = U / max(|U|_F, norm_floor); 0 makes the result scale-free
  // A plausible result has RMS residual |O^T O - I|_F / sqrt(min(rows, cols)) at most this; sets
  // bring their own limit (kernels/coefficients.h). A product costs time, so backends check
  // |O|_F^2 <= min(rows, cols) * (1 + residual_max) instead, plus finiteness of every element; a
  // result that fails is redone in the fp32 standard form.
  double residual_max = 1.05;
};

// One matrix to orthogonalize: row-major rows x cols, contiguous. `o` must not overlap `u`.
struct MatrixJob {
  const float* u = nullptr;
  float* o = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

struct NewtonSchulzResult {
  bool zero_input = false;  // U = 0, so O = 0 by definition
  bool fallback = false;    // the fast path was implausible; redone by the fp32 standard path
  bool failed = false;      // the fallback was bad as well: O must not be used
  double output_norm = 0;   // |O|_F
};

struct AdamWRule {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double decay = 1.0;           // factor on W before the update: 1 - lr * weight_decay
  std::int64_t t = 1;           // applied steps of this parameter, this one included
  double gradient_scale = 1.0;  // clip coefficient, else 1
};

struct AdamWState {
  float* w = nullptr;           // master weights
  float* exp_avg = nullptr;     // m
  float* exp_avg_sq = nullptr;  // v
};

struct AdamWScan {
  StateScan weight;
  StateScan exp_avg;
  StateScan exp_avg_sq;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // "reference" or "cpu": the value of --backend and of the metric label.
  virtual std::string_view name() const = 0;
  // One line for the log: instruction set, library, threads.
  virtual std::string description() const = 0;

  // Memory. Allocate returns `bytes` zeroed bytes aligned to 64, or null when there are none left.
  virtual void* Allocate(std::size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  // dst and src in the backend's memory, not overlapping.
  virtual Error Copy(void* dst, const void* src, std::size_t bytes) = 0;

  // acc[i] (+)= float(data[i]): the fp32 sum over ranks and micro-batches, one call per
  // contribution in contribution order. `first` overwrites instead of adding.
  virtual Error Accumulate(float* acc, const void* data, Dtype dtype, std::size_t elements,
                           bool first) = 0;

  // One pass over a reduced gradient: non-finite count, maximum, sum of squares per block.
  virtual Error Scan(const GradientView& gradient, GradientScan& result) = 0;

  // One pass over `elements` fp32 values of state.
  virtual Error ScanState(const float* data, std::size_t elements, StateScan& result) = 0;

  // dst[i] = round_to_nearest_even(src[i]) in `dtype`: what Pull sends.
  virtual Error Round(void* dst, Dtype dtype, const float* src, std::size_t elements) = 0;

  // Momentum of a whole parameter. Writes U (the Newton-Schulz input) to u_out, and the new M to
  // `m` when `write_m`; with write_m false M is only read (Newton-Schulz before the verdict).
  // U = G + ... as MomentumRule says; without Nesterov U is a copy of M: Newton-Schulz never sees M
  // itself. `state` is filled when write_m.
  virtual Error Momentum(const GradientView& gradient, const MomentumRule& rule, float* m,
                         bool write_m, float* u_out, StateScan& state) = 0;

  // Orthogonalizes every job; results[i] belongs to jobs[i]. Shapes may differ; equal shapes are
  // batched. A matrix gives the same bits alone and in any batch.
  virtual Error NewtonSchulz(std::span<const MatrixJob> jobs, const NewtonSchulzRule& rule,
                             std::span<NewtonSchulzResult> results) = 0;

  // W <- decay W - step O, elementwise; `state` describes the new W.
  virtual Error Apply(float* w, const float* o, std::size_t elements, double decay, double step,
                      StateScan& state) = 0;

  // One AdamW step, one pass: W <- decay W; m, v; W <- W - lr m_hat / (sqrt(v_hat) + eps).
  // The new v is computed as beta2 v + ((1 - beta2) g) g, so that g^2 alone cannot overflow.
  virtual Error AdamW(const GradientView& gradient, const AdamWRule& rule, const AdamWState& state,
                      AdamWScan& scan) = 0;

  // Bytes of scratch that NewtonSchulz keeps for jobs of at most rows x cols (Status, plan).
  virtual std::size_t NewtonSchulzScratchBytes(std::int64_t rows, std::int64_t cols) const = 0;
};

// Fault injection for tests of `fallback` and `failed`: how many of the next Newton-Schulz results
// get one NaN, as a broken fast path or processor would leave. Counted down as they are used up.
struct NewtonSchulzFault {
  std::atomic<int> fast_path{0};  // results of the first attempt
  std::atomic<int> fallback{0};   // results of the fp32 standard redo
};

struct BackendOptions {
  int threads = 0;                                   // 0: one per core
  NewtonSchulzFault* newton_schulz_fault = nullptr;  // null, always, outside tests
};

// The plain fp64 truth: loops one can check against the formulas.
std::unique_ptr<Backend> MakeReferenceBackend();
// OpenBLAS and oneTBB, fp32.
std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options);

}  // namespace muond::kernels
